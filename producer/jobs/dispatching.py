"""Hands to RQ what the queue has for it: webhooks of what has ended, batches that nobody runs.

Strangers write to the queue too. What is none of either is struck off with a line in the log, so
that it keeps nobody from what comes behind it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

import redis
from rq import Queue

from promptq.producer.batch_store.batch_lines import is_batch_id
from promptq.producer.batches.runner_lease import LEASE_MS
from promptq.producer.jobs.rq_queues import (
    batches_waiting,
    enqueue_batch,
    enqueue_webhook,
    is_taken,
)
from promptq.producer.settings import JobsSettings
from promptq.producer.webhooks.webhooks import UnreadableRecordError, message_of, webhook_id_of
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.queue import lookups
from promptq.shared.queue.call import ids_of, is_wrong_type
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.runtime.logs import get_logger

_PAGE = 100
_LEADER_MS = 5000
_LOGGED_CHARACTERS = 100


class Dispatcher:
    """One of possibly several; only the leader works, and the next one leads when it is gone."""

    def __init__(
        self,
        connection: redis.Redis,
        webhooks: Queue,
        batches: Queue,
        settings: JobsSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis: Any = connection
        self._webhooks = webhooks
        self._batches = batches
        self._settings = settings
        self._keys = Keys(settings.queue)
        self._queue = RequestQueue(connection, settings.queue)
        self._token = secrets.token_hex(8).encode()
        self._log = get_logger(queue=settings.queue)
        self._clock = clock
        self._taken: dict[str, float] = {}
        """When batches were first seen that a worker took, and whose runs have no lease yet."""
        self._spoilt: set[str] = set()
        """Keys of which it was told that they are of another type."""

    def leads(self) -> bool:
        """Whether this one is the leader, from now on for some seconds."""
        key = self._keys.jobs_leader
        if self._redis.set(key, self._token, nx=True, px=_LEADER_MS):
            return True
        if self._redis.get(key) != self._token:
            return False
        return bool(self._redis.pexpire(key, _LEADER_MS))

    def step_down(self) -> None:
        """Let another one lead at once."""
        if self._redis.get(self._keys.jobs_leader) == self._token:
            self._redis.delete(self._keys.jobs_leader)

    def hand_out_webhooks(self) -> int:
        """What ended goes to RQ first and is struck off then: after a crash in between it goes
        there again, under the same id."""
        key = self._keys.webhooks
        ids = self._entries(key, lambda: self._redis.zrange(key, 0, _PAGE - 1))
        for raw, request_id in zip(ids, ids_of(ids), strict=True):
            try:
                message = message_of(self._keys.queue, request_id, self._record_of(request_id))
            except (InvalidRequestError, UnreadableRecordError) as error:
                self._log.warning("webhook struck off", entry=_shown(raw), reason=str(error))
                message = None
            if message is not None:
                url, body = message
                webhook_id = webhook_id_of(self._keys.queue, request_id)
                timeout = self._settings.webhook_timeout_seconds
                enqueue_webhook(self._webhooks, self._keys.queue, webhook_id, url, body, timeout)
            self._redis.zrem(key, raw)
        return len(ids)

    def _record_of(self, request_id: str) -> dict[str, str]:
        """Raises InvalidRequestError for no id, UnreadableRecordError where there is no hash."""
        check_request_id(request_id)
        try:
            return self._queue.run(lookups.record(self._keys, request_id))
        except redis.ResponseError as error:
            if not is_wrong_type(error):
                raise
            raise UnreadableRecordError("its record is no hash") from None

    def hand_out_batches(self) -> int:
        """New ones, and those whose process is gone."""
        ids = self._unfinished_batches()
        if ids:
            ids -= batches_waiting(self._batches)
            ids = {batch_id for batch_id in ids if not self._is_run(batch_id)}
        ids -= self._just_taken(ids)
        if ids:
            # Once more, and last: one that nobody runs any longer may just have ended.
            ids &= self._unfinished_batches()
        for batch_id in sorted(ids):
            enqueue_batch(self._batches, self._keys.queue, batch_id)
        return len(ids)

    def _unfinished_batches(self) -> set[str]:
        key = self._keys.unfinished_batches
        members = self._entries(key, lambda: self._redis.smembers(key))
        found = set()
        for raw, batch_id in zip(members, ids_of(members), strict=True):
            if is_batch_id(batch_id):
                found.add(batch_id)
            else:
                reason = "it is no batch's id"
                self._log.warning("batch struck off", entry=_shown(raw), reason=reason)
                self._redis.srem(key, raw)
        return found

    def _entries(self, key: str, read: Callable[[], Iterable[bytes]]) -> list[bytes]:
        """What is listed under a key; nothing where a stranger made something else of it."""
        try:
            found = list(read())
        except redis.ResponseError as error:
            if not is_wrong_type(error):
                raise
            if key not in self._spoilt:
                self._log.warning("a list counts as empty", key=key, reason=str(error))
                self._spoilt.add(key)
            return []
        self._spoilt.discard(key)
        return found

    def _is_run(self, batch_id: str) -> bool:
        return bool(self._redis.exists(self._keys.batch_runner(batch_id)))

    def _just_taken(self, ids: set[str]) -> set[str]:
        """Those whose runs may yet get a lease. One that has none after the time of a lease counts
        as lost, whatever RQ believes of its worker."""
        now = self._clock()
        since = {it: self._taken.get(it, now) for it in ids if is_taken(self._batches, it)}
        self._taken = {it: at for it, at in since.items() if now - at < LEASE_MS / 1000}
        return set(self._taken)


def _shown(raw: bytes) -> str:
    return repr(raw)[:_LOGGED_CHARACTERS]
