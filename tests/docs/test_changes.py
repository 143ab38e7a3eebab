"""The example changes fit this tree, and are as small as docs/design/cost-of-a-change.md says."""

from __future__ import annotations

import re

import pytest

from tests.docs.changes import PATCHES, TESTS, git
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/design/cost-of-a-change.md").read_text()


def test_each_has_its_tests() -> None:
    assert PATCHES.keys() == TESTS.keys()


@pytest.mark.parametrize("name", sorted(PATCHES))
def test_a_change_applies_and_touches_few_files(name: str) -> None:
    numbers = git(ROOT, "apply", "--check", "--numstat", PATCHES[name])
    touched = [line.split("\t")[2] for line in numbers.splitlines()]
    counts = [
        sum(path.startswith(folders) for path in touched)
        for folders in (("producer/", "shared/", "worker/"), "docs/", "tests/")
    ]
    assert counts[0] <= 4
    row = re.search(rf"^\| \[`{name}`\]\(.*\) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert row is not None
    assert [*map(int, row.groups())] == counts
