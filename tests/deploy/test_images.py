"""The files that images are made of; `make test-images` builds one and serves with it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

FILES = sorted((ROOT / "deploy" / "images").glob("Containerfile*"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_has_nothing_to_say_of_a_containerfile(file: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    read = subprocess.run([hadolint, file], capture_output=True, text=True, check=False)
    assert (read.stdout, read.stderr, read.returncode) == ("", "", 0)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_image_runs_as_nobody_and_hears_that_it_is_to_stop(file: Path) -> None:
    last = file.read_text().rpartition("\nFROM ")[2]
    assert re.search(r"^USER (\d+):\1$", last, re.MULTILINE)
    assert 'ENTRYPOINT ["promptq"]' in last  # no shell in between, which would keep SIGTERM
    assert "STOPSIGNAL SIGTERM" in last
