"""Hands to RQ what the queue has for it: webhooks of what has ended, batches that nobody runs."""

from __future__ import annotations

import secrets
from typing import Any

import redis
from rq import Queue

from producer.jobs.rq_queues import batches_waiting, enqueue_batch, enqueue_webhook
from producer.jobs.settings import JobsSettings
from producer.jobs.webhooks import message_of, webhook_id_of
from shared import lookups
from shared.keys import Keys
from shared.request_queue import RequestQueue

_PAGE = 100
_LEADER_MS = 5000


class Dispatcher:
    """One of possibly several; only the leader works, and the next one leads when it is gone."""

    def __init__(
        self, connection: redis.Redis, webhooks: Queue, batches: Queue, settings: JobsSettings
    ) -> None:
        self._redis: Any = connection
        self._webhooks = webhooks
        self._batches = batches
        self._settings = settings
        self._keys = Keys(settings.queue)
        self._queue = RequestQueue(connection, settings.queue)
        self._token = secrets.token_hex(8).encode()

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
        ids = self._redis.zrange(self._keys.webhooks, 0, _PAGE - 1)
        for raw in ids:
            request_id = raw.decode()
            record = self._queue.run(lookups.record(self._keys, request_id))
            message = message_of(self._keys.queue, request_id, record)
            if message is not None:
                url, body = message
                webhook_id = webhook_id_of(self._keys.queue, request_id)
                timeout = self._settings.webhook_timeout_seconds
                enqueue_webhook(self._webhooks, self._keys.queue, webhook_id, url, body, timeout)
            self._redis.zrem(self._keys.webhooks, raw)
        return len(ids)

    def hand_out_batches(self) -> int:
        """New ones, and those whose process is gone."""
        ids = [raw.decode() for raw in self._redis.smembers(self._keys.unfinished_batches)]
        waiting = batches_waiting(self._batches) if ids else set()
        count = 0
        for batch_id in ids:
            is_run = self._redis.exists(self._keys.batch_runner(batch_id))
            if not is_run and batch_id not in waiting:
                enqueue_batch(self._batches, self._keys.queue, batch_id)
                count += 1
        return count
