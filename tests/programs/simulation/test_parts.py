"""Worlds that are made for a part or a mutant find its fault within a few seeds."""

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


MOST_SEEDS = 12
"""The most worlds of a plan. One world may miss a fault that depends on milliseconds."""


def fault(kind: str, at: float, seconds: float, choice: float = 0.0) -> Fields:
    """Returns a planned fault. The fault hits the first process, unless `choice` selects another
    one."""
    return {"at": at, "kind": kind, "choice": choice, "seconds": seconds}


def dying(kind: str, *times: float) -> list[Fields]:
    """Returns faults that end processes of a kind at these times, one process after the other."""
    return [
        fault(f"kill a {kind}", at, 0.02, 0.4 * (number % 2)) for number, at in enumerate(times)
    ]


GATEWAYS: Fields = {**CALM, "num_gateways": 2}
BACKLOG: Fields = {**CALM, "num_requests": 160, "seconds": 0.2}
PREFERENCES: Fields = {**BACKLOG, "num_requests": 240, "aging_ms": 60_000, "affinity_ms": 200}
BUSY_GATEWAYS: Fields = {**GATEWAYS, "num_requests": 120}
JOBS: Fields = {**CALM, "num_requests": 2, "num_leaders": 2}
DEAD_LEADERS: Fields = {**JOBS, "seconds": 1.0, "faults": dying("process of jobs", 0.7, 0.71)}
DEAD_CLIENTS: Fields = {**CALM, "faults": dying("client", *(each / 20 for each in range(1, 10)))}
FALSE_CANCELS: Fields = {
    **CALM,
    "faults": [
        fault("report cancels that did not happen", 0.2, 0.5),
        fault("fill the disk of the server", 0.24, 0.3),
    ],
}
LOST_MESSAGES: Fields = {
    **CALM,
    "seconds": 4.0,
    "num_requests": 4,
    "faults": [fault("lose messages of channels", 0.1, 5.0)],
}
LOST_ENDS: Fields = {
    **CALM,
    "seconds": 1.0,
    "faults": [fault("lose messages of channels", at, 0.3, 0.99) for at in (0.1, 0.4, 0.7)],
}
SHORT_LOGS: Fields = {**LOST_ENDS, "log_ttl_ms": 200}
LOST_CANCELS: Fields = {
    **CALM,
    "faults": [fault("lose messages of channels", at, 0.5) for at in (0.05, 0.3)],
}
FULL_DISK: Fields = {
    **CALM,
    "seconds": 1.5,
    "faults": [
        fault("fill the disk of the server", 0.5, 1.0),
        fault("drain a worker", 0.52, 0.0),
    ],
}
REFUSED_SCRIPTS: Fields = {
    **CALM,
    "seconds": 1.0,
    "faults": [fault("fill the disk of the server", at, 0.3) for at in (0.2, 0.6)],
}
REFUSED_CLAIMS: Fields = {
    **CALM,
    "num_requests": 120,
    "seconds": 1.0,
    "faults": [
        fault("fill the disk of the server", 0.4, 0.3),
        fault("drain a worker", 0.5, 0.0),
    ],
}
CUT_CLIENT: Fields = {
    **CALM,
    "num_requests": 60,
    "faults": [fault("cut all connections of a process", 0.5, 0.0, 0.99)],
}
CUT_OFTEN: Fields = {
    **CUT_CLIENT,
    "faults": [
        fault("cut all connections of a process", 0.2 + number / 100, 0.0, 0.99)
        for number in range(40)
    ],
}
DRAINS: Fields = {
    **BACKLOG,
    "num_requests": 80,
    "num_workers": 2,
    "faults": [fault("drain a worker", 0.15, 0.0), fault("drain a worker", 0.25, 0.0, 0.9)],
}
FROZEN_WORKERS: Fields = {
    **CALM,
    "num_workers": 2,
    "faults": [fault("freeze a worker", 0.15, 1.6), fault("freeze a worker", 0.5, 1.6, 0.9)],
}
LATE_ROWS: Fields = {
    **BACKLOG,
    "num_workers": 3,
    "faults": [fault("freeze a worker", 0.25, 1.15), fault("freeze a worker", 0.3, 1.25, 0.4)],
}
LOST_REPLIES: Fields = {
    **CALM,
    "num_workers": 2,
    "faults": [
        fault("lose a reply", (2 + number) / 20, 0.0, number % 6 / 10) for number in range(12)
    ],
}
LOST_CLAIMS: Fields = {
    **CALM,
    "num_requests": 60,
    "affinity_ms": 200,
    "lease_ms": 4000,
    "faults": [
        fault("fill the disk of the server", 0.15, 0.1),
        *(fault("lose a reply", 0.4 + number / 80, 0.0, number % 5 / 10) for number in range(60)),
    ],
}
LONG_OUTAGE: Fields = {**CALM, "seconds": 13.0, "faults": [fault("kill the server", 0.2, 12.0)]}
OUTAGE: Fields = {**CALM, "faults": [fault("kill the server", 0.3, 0.8)]}
DEAD_WORKERS: Fields = {**CALM, "faults": dying("worker", 0.1, 0.2, 0.3, 0.4)}
DEAD_HOLDERS: Fields = {
    **CALM,
    "num_workers": 2,
    "affinity_ms": 200,
    "faults": dying("worker", 0.4, 0.5),
}

WORLDS = {
    "reaper-never-reaps": (DEAD_WORKERS, "no end"),
    "reaper-reaps-after-an-outage": (OUTAGE, "early reap"),
    "reaper-has-no-patience": (OUTAGE, "early reap"),
    "a-failed-claim-ends-the-worker": (LONG_OUTAGE, "bad exit"),
    "a-lost-channel-ends-the-worker": (LONG_OUTAGE, "bad exit"),
    "a-lost-connection-is-final": (LONG_OUTAGE, "stream failed"),
    "stream-gives-up-early": (LONG_OUTAGE, "stream failed"),
    "stream-never-reconnects": (LONG_OUTAGE, "stream failed"),
    "no-call-is-repeated": (LONG_OUTAGE, "bad exit"),
    "keeper-ends-with-the-connection": (CUT_CLIENT, "late end"),
    "keeper-forgets-to-subscribe-again": (CUT_CLIENT, "late end"),
    "a-drain-goes-on-claiming": (DRAINS, "claim in a drain"),
    "a-stop-gives-nothing-back": (DRAINS, "left behind"),
    "a-lost-lease-goes-on": (FROZEN_WORKERS, "ignored answer"),
    "a-stopped-sequence-goes-on": (CALM, "useless work"),
    "coalescer-delays-too-long": (CALM, "late token"),
    "stream-never-reads-in-silence": (LOST_ENDS, "no end"),
    "mailbox-never-rings": (LOST_ENDS, "no end"),
    "stream-repeats-text-of-the-result": (SHORT_LOGS, "changed text"),
    "keeper-fails-in-silence": (CUT_OFTEN, "late end"),
    "claims-stay-under-way": (LOST_CLAIMS, "crash without a cause"),
    "cancels-are-ignored": ({**CALM, "lease_ms": 4000}, "late cancel"),
    "a-failed-renewal-ends-the-worker": (REFUSED_SCRIPTS, "bad exit"),
    "rows-are-sent-once": (REFUSED_SCRIPTS, "bad exit"),
    "a-cancelled-claim-keeps-its-requests": (DRAINS, "left behind"),
    "the-publisher-does-not-feed": (BACKLOG, "idle"),
    "claims-name-no-answer": (LOST_REPLIES, "no end"),
    "freed-room-is-not-reported": (BACKLOG, "idle"),
    "room-counts-only-if-nothing-waits": (BACKLOG, "idle"),
    "script: lost-fence": (LATE_ROWS, "zombie"),
    "script: rows-anywhere": (LOST_REPLIES, "wrong end"),
    "messages-during-a-claim-are-lost": (CALM, "late claim"),
    "a-lost-claim-is-left-behind": (REFUSED_CLAIMS, "left behind"),
    "a-failed-cancel-ends-the-worker": (FALSE_CANCELS, "bad exit"),
    "a-full-claim-counts-as-empty": (CALM, "idle"),
    "a-heartbeat-repeats-its-batch": (CALM, "stale batch"),
    "answers-to-rows-are-ignored": (LOST_CANCELS, "ignored answer"),
    "held-requests-need-no-slots": (CALM, "holds too much"),
    "nothing-is-claimed-without-a-message": (LOST_MESSAGES, "idle"),
    "returns-are-repeated-at-once": (FULL_DISK, "hammers"),
    "only-running-requests-are-renewed": ({**CALM, "lease_ms": 500}, "late renewal"),
    "gateway-keeps-abandoned-requests": (BUSY_GATEWAYS, "late cancel"),
    "gateway-resumes-at-the-beginning": (GATEWAYS, "http frame"),
    "gateway-ends-twice": (GATEWAYS, "http frame"),
    "everybody-leads": (JOBS, "two leaders"),
    "nobody-asks-for-the-lead": (JOBS, "acts without lead"),
    "dead-leader-stays": (DEAD_LEADERS, "no upkeep"),
    "upkeep-runs-once": (JOBS, "no upkeep"),
    "idempotency-keys-are-forgotten": (DEAD_CLIENTS, "leaked key"),
    "large-requests-are-passed": (BACKLOG, "starves"),
    "preferred-requests-pass-for-ever": (PREFERENCES, "starves"),
    "requests-are-left-for-long": (DEAD_HOLDERS, "idle"),
    "short-requests-pass-for-long": ({**CALM, "shortest_first_ms": 300}, "moved too far"),
    "cancelled-sequence-stays": (CALM, "late cancel"),
}
"""For each mutant, a plan that finds it, and the rule that its world breaks."""


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", WORLDS)
def test_a_broken_part_is_found(name: str, tmp_path: Path) -> None:
    fields, rule = WORLDS[name]
    plan = tmp_path / "plan"
    plan.write_text(json.dumps(fields))
    broken = simulate("--plan", plan, "--seeds", str(MOST_SEEDS), "--mutant", name)
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert f"  {rule}: " in broken.stdout
