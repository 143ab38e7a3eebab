"""A heartbeat may have only what changed since the last one."""

from __future__ import annotations

from typing import Any

from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups, scripts
from promptq.shared.queue.request_queue import RequestQueue

FIRST = WorkerStats(worker_id="w", model="m", num_running=2, overflow=True)
THEN = FIRST.model_copy(update={"num_running": 0})


def test_the_other_fields_stay(client: Any, queue: RequestQueue) -> None:
    assert queue.run(scripts.heartbeat(FIRST, 60_000)) == 1
    assert queue.run(scripts.heartbeat(THEN, 60_000, last=FIRST)) == 1
    found = queue.run(lookups.worker_stats(queue.keys, "w"))
    assert found is not None
    assert found.model_copy(update={"heartbeat_at": 0}) == THEN
    assert found.heartbeat_at > 0
    assert queue.run(lookups.live_worker_ids(queue.keys, 0, overflow=True)) == ["w"]
    assert not client.exists(queue.keys.workers)


def test_without_a_last_report_nothing_is_written(client: Any, queue: RequestQueue) -> None:
    assert queue.run(scripts.heartbeat(THEN, 60_000, last=FIRST)) == -1
    assert client.keys("*") == []
