"""The short form of `make chaos`: a minute with a random seed, which a failure prints."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.programs.chaos.audit.outcome import report
from tests.programs.chaos.audit.records import Queue
from tests.programs.chaos.driver import Run
from tests.programs.chaos.processes.earlier import check_out
from tests.programs.chaos.schedule import MEAN_SECONDS, Fault, schedule
from tests.programs.states.mutants import CHAOS_MUTANTS

SECONDS = 20.0
"""Seconds of faults. Loading models before, and ending all processes after, takes as long."""

FASTER = 5 / 2
MEANS = {fault: mean / FASTER for fault, mean in MEAN_SECONDS.items()}
"""Faults come faster than in a long run: 20 s have as many as 50 s there."""

LOAD = 5 / 3
"""Requests come faster, too."""


@pytest.mark.long
async def test_nothing_is_lost_and_nothing_comes_twice(tmp_path: Path) -> None:
    outcome = await Run(random.randrange(10**6), SECONDS, tmp_path, LOAD, means=MEANS).run()
    print(report(outcome))
    assert not outcome.violations, report(outcome)
    assert set(outcome.faults) == set(MEAN_SECONDS)
    assert outcome.num_deaths > 10
    assert outcome.num_carried_on > 10


@pytest.mark.long
@pytest.mark.matrix(1 / 3)
async def test_a_fleet_is_updated_and_rolled_back_with_nothing_lost(tmp_path: Path) -> None:
    """The full form with all queues, and with the package versions of the earlier release, is `make
    chaos ARGS=--beside-last-release`."""
    try:
        earlier = check_out(tmp_path / "earlier", own_environment=False)
    except subprocess.CalledProcessError:
        pytest.skip("the last release is not in this clone's history")
    # On one core 15 workers become ready in 40 s: kills that come faster find none that serves.
    often = {fault: mean / LOAD for fault, mean in MEAN_SECONDS.items()} | {Fault.KILL: 1.2}
    options = {"queues": [Queue.VOLUME], "means": often, "earlier": earlier}
    ways: set[object] = set()
    for number in range(3):  # in so short a run, streams may by chance pass one way only
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        outcome = await Run(random.randrange(10**6), 24, folder, 8.0 * LOAD, **options).run()
        print(report(outcome))
        assert not outcome.violations, report(outcome)
        ways |= set(outcome.passed_on)
        if len(ways) == 2:
            break
    assert len(ways) == 2, report(outcome)


@pytest.mark.long
async def test_a_lost_fence_is_caught(tmp_path: Path) -> None:
    """The mutant's workers publish although another attempt holds the request. Another worker
    overtakes each of them in turn."""
    often = {Fault.RELAY: 3.0}  # with this seed the first one when all workers are up
    run = Run(268, 120, tmp_path, 2.0, queues=[Queue.VOLUME], means=often, mutant="lost-fence")
    outcome = await run.run()
    assert "zombie" in {violation.rule for violation in outcome.violations}


def test_a_folder_that_is_there_is_not_written_into(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.programs.chaos", "--keep", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"--keep: {tmp_path} is there already" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_mutant_can_be_made() -> None:
    assert all(mutant.texts() for mutant in CHAOS_MUTANTS.values())


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert list(schedule(1, 600)) == list(schedule(1, 600))
    assert list(schedule(1, 600)) != list(schedule(2, 600))


def test_a_schedule_holds_every_fault_in_order_of_time() -> None:
    planned = list(schedule(1, 3600))
    assert {it.fault for it in planned} == set(MEAN_SECONDS)
    assert all(one.at <= other.at for one, other in pairwise(planned))
    kills = sum(it.fault is Fault.KILL for it in planned)
    assert kills > 900
    assert sum(it.fault is Fault.KILL_REAL for it in planned) > 140


def test_a_short_schedule_holds_every_fault_early_enough_to_be_carried_out() -> None:
    for seed in range(100):
        first: dict[Fault, float] = {}
        for planned in schedule(seed, SECONDS, MEANS):
            first.setdefault(planned.fault, planned.at)
        assert set(first) == set(MEAN_SECONDS)
        assert max(first.values()) <= SECONDS / 2
