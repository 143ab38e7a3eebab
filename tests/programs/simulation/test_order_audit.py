"""The audit finds requests that others overtake too often, and requests that move too far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.programs.chaos.audit.auditor import Snapshot
from tests.programs.chaos.audit.records import Kind, Queue, Sent
from tests.programs.simulation.order_audit import check_order, check_scores
from tests.programs.simulation.plan import Plan

PLAN = Plan(1, num_workers=1, num_clients=1, num_requests=1, seconds=1.0, faults=(), aging_ms=400)


def backlog(*claims: tuple[int, int], **fields: Any) -> tuple[list[Sent], Snapshot]:
    """Returns requests that arrive at 1, 2, ... ms, and the server's records. Each of `claims` is
    the score and the time of the claim of one request."""
    requests, records = [], {}
    for number, (score, claimed_at) in enumerate(claims, 1):
        requests.append(Sent(f"{number}", Queue.VOLUME, Kind.PLAIN, fields))
        records[f"{number}"] = {
            "enqueued_at": f"{number}",
            "score": f"{score}",
            "claimed_at": f"{claimed_at}",
            "worker": "w",
        }
    return requests, Snapshot(records)


@pytest.mark.parametrize(("affinity_ms", "num_overtaking"), [(0, 8), (200, 40)])
def test_finds_a_request_that_others_overtake_too_often(
    affinity_ms: int, num_overtaking: int
) -> None:
    plan = replace(PLAN, affinity_ms=affinity_ms)
    claims = [(score, 100 + score) for score in range(2, num_overtaking + 2)]
    assert not [*check_order(*backlog((1, 900), *claims), plan)]
    [found] = check_order(*backlog((1, 900), *claims, (700, 800)), plan)
    assert (found.rule, found.request_id) == ("starves", "1")


@pytest.mark.parametrize(("setting_ms", "most_ms"), [(0, 0), (100, 100), (300, 200)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_finds_a_request_whose_length_moves_it_too_far(
    setting_ms: int, most_ms: int, sign: int
) -> None:
    plan = replace(PLAN, shortest_first_ms=setting_ms)
    level = {"priority": -1}
    assert not [*check_scores(*backlog((1 - 400 + sign * most_ms, 9), **level), plan)]
    [found] = check_scores(*backlog((1 - 400 + sign * (most_ms + 1), 9), **level), plan)
    assert (found.rule, found.request_id) == ("moved too far", "1")
