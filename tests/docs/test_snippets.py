"""Each snippet of the pages does what it says when a reader pastes it."""

from __future__ import annotations

import subprocess
import sys
from shutil import which

import pytest

from tests.docs.snippets import BESIDE, NOT_RUN, STAYS_OPEN, snippets_of
from tests.docs.test_links import PAGES
from tests.support.paths import ROOT

RUN = {
    str(page.relative_to(ROOT)): [
        snippet
        for snippet in snippets_of(page.read_text())
        if not NOT_RUN.fullmatch(snippet.comment)
    ]
    for page in PAGES
}
PAGES_TO_RUN = sorted(page for page, snippets in RUN.items() if snippets)


def assert_snippets_run(page: str) -> None:
    """Each program on a page is a process, and each page has a network of its own."""
    if subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this system permits nobody a network of its own")
    beside = BESIDE.search((ROOT / page).read_text())
    commands = [each.code for each in RUN[page]] + ([beside[1]] if beside else [])
    for name in ("redis-cli", "redis-server"):
        if which(name) is None and any(name in command for command in commands):
            pytest.skip(f"{name} is not installed")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.docs.snippets", page],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    in_terminals = [each for each in RUN[page] if STAYS_OPEN.fullmatch(each.comment)]
    assert ran.stdout.count("\n--- line ") + len(in_terminals) == len(RUN[page])


@pytest.mark.long
def test_the_readme() -> None:
    assert_snippets_run("README.md")


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("page", [page for page in PAGES_TO_RUN if page != "README.md"])
def test_a_page(page: str) -> None:
    assert_snippets_run(page)


def test_a_comment_above_a_snippet_is_understood() -> None:
    comments = {snippet.comment for page in PAGES for snippet in snippets_of(page.read_text())} - {
        ""
    }
    assert len(comments) > 5
    assert [
        each for each in comments if not (NOT_RUN.fullmatch(each) or STAYS_OPEN.fullmatch(each))
    ] == []
