"""Links in the pages, files that they name, and pages that code names are there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
FILES = [
    path
    for folder in ("benchmarks", "deploy", "producer", "shared", "tests", "training", "worker")
    for path in (ROOT / folder).rglob("*")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]
CODE = [path for path in FILES if path.suffix in (".cpp", ".h", ".js", ".lua", ".py")]

LINK = re.compile(r"\]\(([^)\s]+)\)")
MENTION = re.compile(r"\b(docs/[\w./-]+\.md)(?:, ([A-Z]\w+))?")
"""The path of a page, and perhaps the first word of a heading there."""
NAME = re.compile(r"`((?:[a-z]\w*/)*(?:[a-z]\w*/|\w+\.(?:cpp|h|js|lua|py)))`")
"""A folder or a file of code, by its path or the end of it."""
RUN = re.compile(r"(?<![\w`/])((?:benchmarks|tests)(?:[./]\w+)+)")
"""A module or a path of the tests or benchmarks in a command."""
NOT_LOOKED_UP = {"src/promptq/", "tests/artefacts/", "worker/engine/attention/NAME.py"}
"""Links to the folders; what tests make; an example."""


def outside_code(page: Path) -> str:
    """The text of a page without its code: a link or a heading in it is none."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`(?!\])", lambda code: code[0].replace("](", "] ("), text)


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ +(.+?) *$", outside_code(page), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Makes anchors like GitHub: the second of two equal headings gets a number."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in headings(page):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def broken_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(outside_code(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.relative_to(ROOT)}: {target}: there is no such file"
        elif anchor and anchor not in anchors(file):
            yield f"{page.relative_to(ROOT)}: {target}: there is no such heading"


def broken_mentions(file: Path) -> Iterator[str]:
    for path, word in MENTION.findall(file.read_text()):
        if not (ROOT / path).exists():
            yield f"{file.relative_to(ROOT)}: {path}: there is no such page"
        elif word and not any(each.split()[0] == word for each in headings(ROOT / path)):
            yield f"{file.relative_to(ROOT)}: {path}, {word}: there is no such heading"


def test_every_file_that_a_page_names_is_there() -> None:
    names = {
        f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in [*FILES, *ROOT.glob("*/")]
    }
    ends = {name[at:] for name in names for at, each in enumerate(name) if each == "/"}
    history = ROOT / "CHANGELOG.md"
    assert [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        if page != history
        for name in NAME.findall(page.read_text())
        if f"/{name}" not in ends and name not in NOT_LOOKED_UP
    ] == []


def test_every_module_that_a_page_runs_is_there() -> None:
    runs = {(page, name) for page in PAGES for name in RUN.findall(page.read_text())}
    assert len(runs) > 5
    assert [
        f"{page.relative_to(ROOT)}: {name}"
        for page, name in runs
        if not name.endswith(".md")
        for path in [ROOT / name.removesuffix(".py").replace(".", "/")]
        if not path.is_dir() and not path.with_suffix(".py").exists()
    ] == []


def test_every_script_is_explored_or_named_as_not_explored() -> None:
    scripts = {path.stem for path in ROOT.glob("shared/lua/scripts/*.lua")}
    explored = re.findall(r"scripts\.(\w+)", (ROOT / "tests/programs/states/calls.py").read_text())
    page = (ROOT / "docs/reliability.md").read_text()
    [named] = re.findall(
        r"the\s\w+\sscripts\sthat\schange\sno\srequest:(.*?)\n\n",
        page.replace("\nThe ", "\n\nThe "),
        re.DOTALL,
    )
    assert {*explored, *re.findall(r"`(\w+)`", named)} == scripts


def test_every_link_of_a_page_leads_somewhere() -> None:
    assert len(PAGES) > 10
    assert [each for page in PAGES for each in broken_links(page)] == []


def test_every_page_that_code_mentions_is_there() -> None:
    assert len(CODE) > 100
    assert [each for file in [*CODE, ROOT / "Makefile"] for each in broken_mentions(file)] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, following = set[Path](), [ROOT / "README.md"]
    while following:
        page = following.pop()
        reached.add(page)
        targets = (target.partition("#")[0] for target in LINK.findall(outside_code(page)))
        pages = {(page.parent / each).resolve() for each in targets if each.endswith(".md")}
        following += [each for each in pages - reached if each.is_relative_to(ROOT / "docs")]
    assert {*ROOT.glob("docs/**/*.md")} - reached == set()
