"""docs/compatibility.md: written from what the programs told, and read back."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tests.compat.catalogue import PROGRAMS, Program
from tests.compat.recorder import Exchange
from tests.paths import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
_CELL = 400
_PASSES, _FAILS = "passes", "**fails**"
_HEAD = """# Other people's programs

`python -m tests compat` wrote this page. It runs each program for real, in the version that is
named here, against a gateway with the shipped model. A program has an environment and a home of its
own, no network but loopback, an API key, and the alias `gpt-4o` for the model. It passes by what it
got: the same text, usage and reason to finish as a plain call, a stream in several chunks,
arguments that follow the schema, and errors that say to the program's user what would be right.
"""
_CHANGING = (
    (re.compile(r"(?:https?://)?(?:127\.0\.0\.1|localhost):\d+"), "GATEWAY"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "0x"),
    (re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"), "ID"),
    (re.compile(r"\b(chatcmpl|cmpl|resp|msg|call|req)[-_][\w-]{8,}"), r"\1-ID"),
    (re.compile(r"/[\w./-]*/compat(?:-\w+)?/"), ""),
)
"""What differs from run to run."""


@dataclass(frozen=True)
class Told:
    """What a script told of one attempt."""

    tried: str
    passed: bool
    got: str
    why: str


def section(program: Program, told: Sequence[Told], exchanges: Sequence[Exchange]) -> str:
    """The part of the page about one program."""
    version = program.version or "whatever the machine has"
    lines = [f"## {program.name}", "", f"{version}. {program.about}".strip(), ""]
    lines += ["| tried | | why not |", "|---|---|---|"]
    for each in told:
        outcome = _PASSES if each.passed else _FAILS
        lines.append(f"| {each.tried} | {outcome} | {_cell(each.why)} |".replace("|  |", "| |"))
    if sent := _sent(exchanges):
        lines += ["", "It sends:", "", *sent]
    return "\n".join(lines)


def write(sections: dict[str, str]) -> None:
    """Write the page with these sections; those of other programs stay as they are."""
    old = _sections(PAGE.read_text()) if PAGE.exists() else {}
    kept = {**old, **sections}
    parts = [kept[name].strip() for name in PROGRAMS if name in kept]
    summary = ["| program | passes | fails |", "|---|---|---|"]
    for part in parts:
        name = part.splitlines()[0].removeprefix("## ")
        outcomes = _outcomes(part)
        passed = sum(outcomes.values())
        summary.append(f"| [{name}](#{name}) | {passed} | {len(outcomes) - passed or ''} |")
    summary = [line.replace("|  |", "| |") for line in summary]
    PAGE.write_text("\n\n".join([_HEAD.strip(), "\n".join(summary), *parts]) + "\n")


def committed() -> dict[str, set[str]]:
    """By program, what passes according to the committed page; nothing if there is none."""
    command = ["git", "-C", str(ROOT), "show", f"HEAD:{PAGE.relative_to(ROOT)}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        name: {tried for tried, passed in _outcomes(part).items() if passed}
        for name, part in _sections(done.stdout).items()
    }


def _sections(text: str) -> dict[str, str]:
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part for part in parts}


def _outcomes(part: str) -> dict[str, bool]:
    rows = re.findall(r"^\| (.+?) \| (passes|\*\*fails\*\*) \|", part, re.MULTILINE)
    return {tried: outcome == _PASSES for tried, outcome in rows}


def _cell(text: str) -> str:
    for pattern, instead in _CHANGING:
        text = pattern.sub(instead, text)
    text = " ".join(text.split())
    text = text if len(text) <= _CELL else f"{text[:_CELL]} ..."
    return text.replace("|", r"\|").replace("<", "&lt;").replace("](", "] (").replace("`", "'")


def _sent(exchanges: Sequence[Exchange]) -> list[str]:
    """Each path that a program asked, with all fields that it sent there."""
    found: dict[str, set[str]] = {}
    for each in exchanges:
        fields = found.setdefault(f"{each.method} {each.path.split('?')[0]}", set())
        try:
            body = json.loads(each.body)
        except ValueError:
            continue
        if isinstance(body, dict):
            fields.update(body)
    ids = re.compile(r"/(?:[\w-]*[0-9a-f-]{20,}|file-\w+|batch_\w+)")
    named: dict[str, set[str]] = {}
    for path, fields in found.items():
        named.setdefault(ids.sub("/ID", path), set()).update(fields)
    return [
        f"- `{path}`" + (f": {', '.join(f'`{name}`' for name in sorted(fields))}" if fields else "")
        for path, fields in sorted(named.items())
    ]
