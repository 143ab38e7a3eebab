"""The pages of `python -m tests` and `python -m benchmarks`, and the targets of the Makefile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.__main__ import PROGRAMS as BENCHMARKS
from tests.__main__ import PROGRAMS as TESTS
from tests.docs.test_links import CODE, PAGES
from tests.support.paths import ROOT
from tests.support.program_list import Program, run

COMMANDS = {"tests": TESTS, "benchmarks": BENCHMARKS}


@pytest.mark.parametrize("package", COMMANDS)
def test_page_has_a_sentence_for_each_program(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [package])
    assert run(f"python -m {package}", COMMANDS[package]) == 0
    usage, empty, *lines = capsys.readouterr().out.splitlines()
    assert (usage, empty) == (f"usage: python -m {package} NAME [--help] [ARGUMENTS]", "")
    assert [line.split()[0] for line in lines] == list(COMMANDS[package])
    for line in lines:
        assert re.fullmatch(r"  [a-z-]+ +[A-Z].+\.", line), line
        assert len(line) <= 100


def test_unknown_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tests", "chaoss"])
    assert run("python -m tests", TESTS) == 2
    assert "no 'chaoss'" in capsys.readouterr().err


ENDING = """
import os, signal, sys
if (word := sys.argv[1]) == "exit":
    sys.exit(3)
os.kill(os.getpid() if word == "kill" else os.getppid(), signal.Signals[sys.argv[2]])
signal.pause()
"""


@pytest.mark.parametrize(
    ("words", "code", "name"),
    [
        ("exit", 3, ""),
        ("kill SIGKILL", 137, "SIGKILL"),
        ("parent SIGTERM", 143, "SIGTERM"),
    ],
)
def test_a_killed_program_is_named(words: str, code: int, name: str, tmp_path: Path) -> None:
    """Whether the program is killed or the process that waits for it."""
    (tmp_path / "ending.py").write_text(ENDING)
    starting = f"from {Program.__module__} import *; sys.exit(Program('ending').run(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", starting, *words.split()],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code
    assert ended.stderr == (f"ending was killed by {name}\n" if name else "")


def test_pages_and_code_name_what_there_is() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    shown = subprocess.check_output(["make", "-s", "-C", ROOT, "help"], text=True)
    assert targets == re.findall(r"^make ([a-z-]+)", shown, re.MULTILINE)
    wrong = []
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    for file in [*pages, *CODE, ROOT / "Makefile", ROOT / ".ci" / "run"]:
        text = file.read_text()
        wrong += [
            f"{file}: make {name}"
            for name in re.findall(r"`make ([a-z-]+)", text)
            if name not in targets
        ]
        for package, programs in COMMANDS.items():
            wrong += [f"{file}: {package} {name}" for name in named(text, package, programs)]
    assert wrong == []


def named(text: str, package: str, programs: Mapping[str, Program]) -> list[str]:
    """Returns the names after `python -m PACKAGE` that are no program."""
    names = re.findall(rf"python -m {package} ([a-z][a-z-]*)", text)
    return [name for name in names if name not in programs]
