"""Worlds of random seeds keep all promises, and each seed gives one and the same world."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.simulation.mutants import MUTANTS
from tests.support.processes import run

NUM_SEEDS = 20
MOST_SEEDS = 10**6


def simulate(*arguments: str | Path, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Runs worlds in a new process."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "tests.programs.simulation", *arguments]
    return run(*command, env=environment)


def hashes_of(*arguments: str, hash_seed: str) -> list[str]:
    """Returns a line with the hash of each world. No world may break a promise."""
    seeds = ["--seeds", str(NUM_SEEDS), "--most-requests", "30", *arguments]
    ended = simulate(*seeds, "--hashes", hash_seed=hash_seed)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()[:NUM_SEEDS]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("server", [[], ["--server", "valkey-server"]], ids=["", "valkey"])
def test_equal_seeds_give_equal_worlds_without_violations(server: list[str]) -> None:
    seed = random.randrange(MOST_SEEDS)
    print(f"seed {seed}")
    first, second = (
        hashes_of("--seed", str(seed), *server, hash_seed=hash_seed) for hash_seed in ("1", "2")
    )
    assert first == second
    assert len({line.split()[1] for line in first}) == NUM_SEEDS


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", [name for name in MUTANTS if name != "reaper-never-reaps"])
def test_a_broken_module_is_found(name: str) -> None:
    ended = simulate("--seeds", "5", "--most-requests", "30", "--mutant", name)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "violations" in ended.stdout


def test_a_failing_world_is_shrunk(tmp_path: Path) -> None:
    plan, story = tmp_path / "plan", tmp_path / "story"
    broken = ["--mutant", "stream-repeats"]
    assert simulate("--shrink", plan, *broken).returncode == 1
    again = simulate("--plan", plan, "--trace", story, *broken)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "repeat: " in again.stdout
    assert "worker-1.1" in story.read_text()


def test_a_file_without_a_plan_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("{}")
    ended = simulate("--plan", plan)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"{plan} is no plan of a world: KeyError('faults')\n"
