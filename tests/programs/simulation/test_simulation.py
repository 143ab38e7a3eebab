"""Worlds of random seeds keep all promises, and each seed gives one and the same world."""

from __future__ import annotations

import random
import sys

from tests.support.processes import run

NUM_SEEDS = 20
MOST_SEEDS = 10**6


def hashes_of(seed: int, hash_seed: str) -> list[str]:
    """Runs worlds in a new process, and returns a line with the hash of each."""
    seeds = ["--seeds", str(NUM_SEEDS), "--seed", str(seed)]
    command = [sys.executable, "-m", "tests.programs.simulation", *seeds, "--hashes"]
    ended = run(*command, env={"PYTHONHASHSEED": hash_seed})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()[:NUM_SEEDS]


def test_equal_seeds_give_equal_worlds_without_violations() -> None:
    seed = random.randrange(MOST_SEEDS)
    print(f"seed {seed}")
    first, second = (hashes_of(seed, hash_seed) for hash_seed in ("1", "2"))
    assert first == second
    assert len({line.split()[1] for line in first}) == NUM_SEEDS
