"""Checks the order in which workers claim requests: none starves beyond what aging allows.

A score is the time of enqueueing, moved by the priority, so with time each request comes before all
that are enqueued later. A request behind another one may overtake only if the other does not fit
into the worker, and only in a limited number of claims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.programs.chaos.audit.auditor import Snapshot, Violation
from tests.programs.chaos.audit.records import Sent

_MOST_PASSES = 8
"""The most claims that pass over a request, as in claim.lua."""


def check_order(sent: Iterable[Sent], snapshot: Snapshot) -> Iterator[Violation]:
    """Yields a violation for each request that later ones overtook too often. Needs a world without
    faults, and leaves out requests that a drain has given back."""
    waits = []
    for request in sent:
        record = snapshot.requests.get(request.request_id, {})
        if {"claimed_at", "worker"} <= record.keys() and int(record.get("attempt", 1)) == 1:
            waits_from = int(record["enqueued_at"]) + request.delay_ms
            score, claimed_at = float(record["score"]), int(record["claimed_at"])
            waits.append((request.request_id, score, waits_from, claimed_at, record["worker"]))
    for request_id, score, waits_from, claimed_at, _ in waits:
        passing = {
            (other_at, worker)
            for _, other_score, _, other_at, worker in waits
            if other_score > score and waits_from < other_at < claimed_at
        }
        if len(passing) > _MOST_PASSES:
            seen = f"{len(passing)} claims passed over it in {claimed_at - waits_from} ms"
            yield Violation("starves", request_id, seen)
