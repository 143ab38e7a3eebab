"""Worlds with gateways, jobs or dying clients find a fault in each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.programs.simulation.test_simulation import simulate

Fields = dict[str, Any]

CALM: Fields = {
    "seed": 1,
    "num_workers": 1,
    "num_clients": 1,
    "num_requests": 40,
    "seconds": 0.5,
    "faults": [],
    "aging_ms": 200,
}


def dying(kind: str, *times: float) -> list[Fields]:
    """Returns faults at these times, which concern the processes of a kind in turns."""
    return [
        {"at": at, "kind": f"kill a {kind}", "choice": 0.4 * (number % 2), "seconds": 0.02}
        for number, at in enumerate(times)
    ]


GATEWAYS: Fields = {**CALM, "num_gateways": 2}
BACKLOG: Fields = {**CALM, "num_requests": 160, "seconds": 0.2}
BUSY_GATEWAYS: Fields = {**GATEWAYS, "num_requests": 120}
JOBS: Fields = {**CALM, "num_requests": 2, "num_leaders": 2}
DEAD_LEADERS: Fields = {**JOBS, "seconds": 1.0, "faults": dying("process of jobs", 0.7, 0.71)}
DEAD_CLIENTS: Fields = {**CALM, "faults": dying("client", *(each / 20 for each in range(1, 10)))}
DEAD_WORKERS: Fields = {**CALM, "faults": dying("worker", 0.1, 0.2, 0.3, 0.4)}

WORLDS = {
    "reaper-never-reaps": (DEAD_WORKERS, "no end"),
    "gateway-keeps-abandoned-requests": (BUSY_GATEWAYS, "late cancel"),
    "gateway-resumes-at-the-beginning": ({**GATEWAYS, "seed": 5}, "http frame"),
    "gateway-ends-twice": (GATEWAYS, "http frame"),
    "everybody-leads": (JOBS, "two leaders"),
    "nobody-asks-for-the-lead": (JOBS, "acts without lead"),
    "dead-leader-stays": (DEAD_LEADERS, "no upkeep"),
    "upkeep-runs-once": (JOBS, "no upkeep"),
    "idempotency-keys-are-forgotten": (DEAD_CLIENTS, "leaked key"),
    "large-requests-are-passed": (BACKLOG, "starves"),
    "cancelled-sequence-stays": (CALM, "late cancel"),
}
"""For each mutant, a world that finds it, and the rule that this world breaks."""


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", WORLDS)
def test_a_broken_part_is_found(name: str, tmp_path: Path) -> None:
    fields, rule = WORLDS[name]
    plan = tmp_path / "plan"
    plan.write_text(json.dumps(fields))
    broken = simulate("--plan", plan, "--mutant", name)
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert f"  {rule}: " in broken.stdout
