"""Enqueues batches in RQ if no process runs them and an RQ worker is free. Tenants take turns.

Other programs may write to the queue, too. An entry that is not a batch is deleted and logged, so
that the entry does not block later entries.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from itertools import compress

import redis
from rq import Queue

from promptq.producer.batch_store.input_file import is_batch_id
from promptq.producer.batches.batch_job import LEASE_MS
from promptq.producer.jobs.rq_jobs import (
    batches_waiting,
    enqueue_batch,
    is_queued_or_started,
    num_workers,
)
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue import scripts
from promptq.shared.queue.call import Call, ids_of
from promptq.shared.queue.lookups import entries_of, shown
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.spoilt import errors_logged
from promptq.shared.runtime.logs import get_logger

_LEADER_MS = 5000
_MAX_TENANTS = 10_000


class Dispatcher:
    """Enqueues batches in RQ. Of several dispatchers, only the leader enqueues."""

    def __init__(
        self,
        connection: redis.Redis,
        batches: Queue,
        settings: JobsSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batches = batches
        self._keys = Keys(settings.queue)
        self._queue = RequestQueue(connection, settings.queue)
        self._holder = secrets.token_hex(8)
        self._log = get_logger(queue=settings.queue)
        self._clock = clock
        self._starting: dict[str, float] = {}
        """For each starting batch, the time at which it was first seen. A batch is starting while a
        worker has the batch, but the run has no lease yet."""
        self._served: dict[bytes, None] = {}
        """Tenants whose batches were started, as JSON texts, in the order of their last starts."""

    def leads(self) -> bool:
        """Acquires or renews the lead for some seconds. Returns whether this process leads."""
        return self._lead_for(_LEADER_MS)

    def step_down(self) -> None:
        """Releases the lead, so that another process can lead at once."""
        self._lead_for(0)

    def _lead_for(self, ttl_ms: int) -> bool:
        key = self._keys.jobs_leader
        return self._queue.run(scripts.hold(self._keys, key, self._holder, ttl_ms))

    def hand_out_batches(self) -> int:
        """Enqueues new or interrupted batches, one for each free RQ worker. Returns the number."""
        unfinished = self._unfinished_batches()
        if not unfinished:
            self._starting.clear()
            return 0
        in_rq, running = batches_waiting(self._batches), self._running(unfinished)
        ids = unfinished - in_rq - running
        starting = self._find_starting(ids)
        ids -= starting
        num_free = num_workers(self._batches) - len(in_rq | running | starting)
        if not ids or num_free <= 0:
            return 0
        # Read the list once more: a batch without a process may just have ended.
        chosen = self._in_turn(ids & self._unfinished_batches(), num_free)
        for batch_id in chosen:
            with errors_logged(f"batch {batch_id}"):
                enqueue_batch(self._batches, self._keys.queue, batch_id)
        return len(chosen)

    def _in_turn(self, ids: set[str], count: int) -> list[str]:
        """Chooses up to `count` batches. Each time, chooses the tenant that has waited longest
        since one of its batches was chosen, and takes the tenant's oldest batch."""
        waiting: dict[bytes, list[str]] = {}
        listed = sorted(ids)
        keys = [self._keys.batch(batch_id) for batch_id in listed]
        reading = [
            Call("", ["HGET", key, "tenant"], lambda text: text or b"", bytes) for key in keys
        ]
        for batch_id, tenant in zip(listed, self._queue.run(reading), strict=True):
            waiting.setdefault(tenant, []).append(batch_id)
        chosen: list[str] = []
        while waiting and len(chosen) < count:
            order = {tenant: at for at, tenant in enumerate(self._served)}
            tenant = min(waiting, key=lambda each: (order.get(each, -1), waiting[each][0]))
            chosen.append(waiting[tenant].pop(0))
            if not waiting[tenant]:
                del waiting[tenant]
            self._served.pop(tenant, None)
            self._served[tenant] = None
        while len(self._served) > _MAX_TENANTS:
            del self._served[next(iter(self._served))]
        return chosen

    def _unfinished_batches(self) -> set[str]:
        key = self._keys.unfinished_batches
        members = self._queue.run(entries_of("SMEMBERS", key))
        batch_ids = set()
        for raw, batch_id in zip(members, ids_of(members), strict=True):
            if is_batch_id(batch_id):
                batch_ids.add(batch_id)
            else:
                reason = "not a batch's id"
                self._log.warning("batch entry removed", entry=shown(raw), reason=reason)
                self._queue.run(Call("", ["SREM", key, raw], int))
        return batch_ids

    def _running(self, ids: set[str]) -> set[str]:
        listed = sorted(ids)
        keys = [self._keys.batch_runner(batch_id) for batch_id in listed]
        are_run = self._queue.run([Call("", ["EXISTS", key], bool) for key in keys])
        return set(compress(listed, are_run))

    def _find_starting(self, ids: set[str]) -> set[str]:
        """Returns the batches that a worker got so recently that their runs have no lease yet.

        A run without a lease after `LEASE_MS` counts as lost, even if RQ still knows its worker.
        """
        now = self._clock()
        since: dict[str, float] = {}
        for batch_id in ids:
            with errors_logged(f"batch {batch_id}"):
                if is_queued_or_started(self._batches, batch_id):
                    since[batch_id] = self._starting.get(batch_id, now)
        self._starting = {each: at for each, at in since.items() if now - at < LEASE_MS / 1000}
        return set(self._starting)
