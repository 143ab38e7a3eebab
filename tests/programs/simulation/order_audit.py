"""Checks the order in which workers claim requests: none starves beyond what the settings allow.

A score is the time of enqueueing, moved by the priority and by at most `shortest_first_ms`. So at
some time each request comes before all requests that are enqueued later. A request may overtake an
earlier one in two cases only. First, the earlier request does not fit into the worker; this counts
for a limited number of claims. Second, the worker prefers the later request (`affinity_ms`); this
counts for a limited number of requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from tests.programs.chaos.audit.auditor import Snapshot, Violation
from tests.programs.chaos.audit.records import Sent
from tests.programs.simulation.plan import Plan

_MOST_PASSES = 8
"""The most claims that pass over a request, as in claim.lua."""
_MOST_PREFERRED = 32
"""The most requests that overtake a request by affinity, for each worker, as in scores.lua."""
_TOLERANCE_MS = 0.01


def check_scores(sent: Iterable[Sent], snapshot: Snapshot, plan: Plan) -> Iterator[Violation]:
    """Yields a violation for each request that its expected output length moves further than the
    settings allow."""
    most_ms = min(plan.shortest_first_ms, plan.aging_ms / 2)
    for request in sent:
        record = snapshot.requests.get(request.request_id, {})
        if {"score", "enqueued_at"} <= record.keys():
            level_ms = plan.aging_ms * request.fields.get("priority", 0)
            moved_ms = float(record["score"]) - int(record["enqueued_at"]) - level_ms
            if abs(moved_ms) > most_ms + _TOLERANCE_MS:
                seen = f"its length moves it by {moved_ms:.0f} ms, at most {most_ms:g} are allowed"
                yield Violation("moved too far", request.request_id, seen)


def check_order(sent: Iterable[Sent], snapshot: Snapshot, plan: Plan) -> Iterator[Violation]:
    """Yields a violation for each request that later requests overtook too often. The world must
    have no faults. Leaves out requests that a drain has given back."""
    most_preferred = _MOST_PREFERRED * plan.num_workers if plan.affinity_ms else 0
    waits = []
    for request in sent:
        record = snapshot.requests.get(request.request_id, {})
        if {"claimed_at", "worker"} <= record.keys() and int(record.get("attempt", 1)) == 1:
            waits_from = int(record["enqueued_at"]) + request.delay_ms
            score, claimed_at = float(record["score"]), int(record["claimed_at"])
            waits.append((request.request_id, score, waits_from, claimed_at, record["worker"]))
    for request_id, score, waits_from, claimed_at, _ in waits:
        passing = Counter(
            (other_at, worker)
            for _, other_score, _, other_at, worker in waits
            if other_score > score and waits_from < other_at < claimed_at
        )
        num_preferred = sum(sorted(passing.values())[:-_MOST_PASSES])
        if num_preferred > most_preferred:
            seen = f"{passing.total()} requests overtook it in {claimed_at - waits_from} ms"
            yield Violation("starves", request_id, seen)
