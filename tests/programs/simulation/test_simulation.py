"""Worlds of random seeds keep all promises, and each seed always gives the same world."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from tests.programs.simulation.engine import SimulatedRunner, engine_of
from tests.programs.simulation.loop import Process, SimulatedLoop
from tests.programs.simulation.mutants import QUICK
from tests.programs.simulation.plan import Fault, Plan, PlannedFault
from tests.programs.simulation.server import ServerProcess, compile_library
from tests.programs.simulation.shrinking import read_plan
from tests.support.processes import run

NUM_SEEDS = 6
NUM_MUTANTS = 2
MOST_SEEDS = 200
"""Few, so that a rare world that comes near a limit of time fails in each run or in none."""


def simulate(*arguments: str | Path, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Run worlds in a new process. Returns the completed process."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "tests.programs.simulation", *arguments]
    return run(*command, env=environment)


def hashes_of(*arguments: str, hash_seed: str) -> list[str]:
    """Run worlds. Returns a line with the hash of each world. Asserts that no world breaks a
    promise."""
    seeds = ["--seeds", str(NUM_SEEDS), "--most-requests", "4", *arguments]
    ended = simulate(*seeds, "--hashes", hash_seed=hash_seed)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()[:NUM_SEEDS]


@pytest.mark.long
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


def test_broken_modules_are_found() -> None:
    seed = random.randrange(MOST_SEEDS)
    print(f"seed {seed}")
    names = random.Random(seed).sample(QUICK, NUM_MUTANTS)
    worlds = ["--seed", "914", "--seeds", "40", "--most-requests", "12", "--jobs", "2"]
    ended = simulate(*worlds, "--mutant", ",".join(names))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"0 of {NUM_MUTANTS} mutants not found" in ended.stdout


def test_a_broken_script_is_found() -> None:
    ended = simulate("--seeds", "5", "--most-requests", "12", "--mutant", "script: no-reap")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "violations" in ended.stdout


def test_an_unknown_mutant_is_refused() -> None:
    ended = simulate("--mutant", "nobody")
    assert ended.returncode == 2
    assert ended.stderr.endswith("error: argument --mutant: no mutant is named 'nobody'\n")


@pytest.mark.long
def test_a_failing_world_is_shrunk(tmp_path: Path) -> None:
    plan, story = tmp_path / "plan", tmp_path / "story"
    broken = ["--mutant", "stream-repeats", "--most-requests", "12"]
    assert simulate("--shrink", plan, *broken).returncode == 1
    again = simulate("--plan", plan, "--trace", story, *broken)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "repeat: " in again.stdout
    assert "worker-1.1" in story.read_text()


def test_idle_workers_send_at_most_5_commands_a_second() -> None:
    ended = simulate("--fleets", "1", "3", "--most-requests", "10")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.strip("| ").split(" | ") for line in ended.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "3"]
    assert all(1 < float(row[1]) <= 5 for row in rows), ended.stdout


def test_an_engine_measures_the_virtual_seconds_of_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(SimulatedLoop("1", 1), "worker")
    monkeypatch.setattr(time, "perf_counter", process.perf_counter)
    runner = SimulatedRunner(36, 8, process, random.Random(1), slowness=10)
    engine = engine_of(runner, num_slots=8)
    engine.add(EngineRequest(1, [1] * 20, SamplingParams(), seed=0, max_tokens=2))
    stats = engine.step().stats
    assert runner.seconds > 0
    assert stats.step_seconds == pytest.approx(runner.seconds)


def test_a_world_is_compared_with_real_processes() -> None:
    ended = simulate("--fleets", "1", "--real", "--most-requests", "10")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.strip("| ").split(" | ") for line in ended.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["processes", "world"]
    for _, rate, waiting, first_token in rows:
        (wait_50, wait_95), (token_50, token_95) = (
            map(float, cell.split(", ")) for cell in (waiting, first_token)
        )
        assert float(rate) > 0, ended.stdout
        assert 0 <= wait_50 <= token_50 <= token_95, ended.stdout
        assert wait_50 <= wait_95 <= token_95, ended.stdout


def test_most_requests_end_before_the_quoted_time() -> None:
    ended = simulate("--quotes", "0.9", "--seconds", "60", "--seeds", "1", "--seed", "3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [row] = [line.strip("| ").split(" | ") for line in ended.stdout.splitlines()[2:]]
    num_requests, quoted, before_p50, before_p95 = (int(cell.strip("%")) for cell in row[1:5])
    assert num_requests > 80, ended.stdout
    assert quoted > 50, "nothing is known at the beginning"
    assert 20 < before_p50 < before_p95, ended.stdout
    assert before_p95 >= 80, ended.stdout
    assert 0.4 < float(row[5]) < 2, ended.stdout


FAULT = {"at": 1.0, "kind": "kill a worker", "choice": 0.5, "seconds": 1.0}
PLAN = {
    "seed": 1,
    "num_workers": 1,
    "num_clients": 1,
    "num_requests": 1,
    "seconds": 1.0,
    "faults": [FAULT],
}


def test_a_plan_that_no_world_can_have_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    with pytest.raises(ValueError, match="No such file"):
        read_plan(plan)
    texts = [json.dumps(PLAN)[:40], "[" * 100_000, "[]", json.dumps({**PLAN, "more": 1})]
    changes: list[dict[str, Any]] = [
        *({"num_workers": 0}, {"num_clients": "1"}, {"seconds": "1"}, {"seed": "1"}),
        *({"seconds": math.nan}, {"faults": [{**FAULT, "at": -1}]}),
        *({"faults": [{**FAULT, "choice": 1}]}, {"faults": [{**FAULT, "kind": "none"}]}),
    ]
    for text in [*texts, *(json.dumps({**PLAN, **change}) for change in changes)]:
        plan.write_text(text)
        with pytest.raises(ValueError, match="is no plan of a world"):
            read_plan(plan)
    plan.write_text(json.dumps(PLAN))
    assert read_plan(plan).seconds == 1.0


def test_a_file_without_a_plan_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("{}")
    ended = simulate("--plan", plan)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"{plan} is no plan of a world: KeyError('faults')\n"


def test_fleets_that_prefer_what_they_hold_compute_less() -> None:
    ended = simulate("--fleets", "2", "--affinity", "500", "--scale", "0.03")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in ended.stdout.splitlines()[2:]]
    computed = {(load, ms): float(share) for _, load, _, ms, share, *_ in rows}
    for load in ("20 documents", "conversations"):
        assert 1 <= computed[load, "500"] < computed[load, "0"]
    assert computed["nothing shared", "500"] == computed["nothing shared", "0"] == 1


@pytest.mark.parametrize("kind", [Fault.RESTART, Fault.OUTAGE, Fault.DISK_FULL])
def test_only_a_server_that_a_fault_kills_writes_its_data(kind: Fault, tmp_path: Path) -> None:
    plan = replace(Plan.of(1), faults=(PlannedFault(1.0, kind, 0.0, 1.0),))
    library = compile_library(tmp_path)
    with ServerProcess(tmp_path, library, keeps_data=plan.kills_server) as server:
        assert server.ask(("SET", "key", "value")) == [b"OK"]
        server.kill()
        server.start()
        [kept] = server.ask(("GET", "key"))
    assert (kept == b"value") == (kind is not Fault.DISK_FULL)
