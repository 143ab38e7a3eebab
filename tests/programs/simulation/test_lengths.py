"""The program that judges `shortest_first_ms` measures a gain where lengths are known."""

from __future__ import annotations

import sys

import pytest

from tests.support.processes import run


@pytest.mark.matrix(1)
@pytest.mark.parametrize("learned", [["--requests", "200"], ["--learned", "--requests", "300"]])
def test_short_requests_wait_less_when_many_wait(learned: list[str]) -> None:
    options = ["--seeds", "1", "--loads", "1.5", "--predictabilities", "1", *learned]
    ended = run(sys.executable, "-m", "tests.programs.simulation.lengths", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    mean, short, _ = (float(each) for each in ended.stdout.split("|")[4].split(","))
    assert short < mean < 1
