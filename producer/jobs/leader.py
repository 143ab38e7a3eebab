"""The work of the leader of all `promptq jobs`: batches, webhooks, and enqueueing upkeep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import redis

from promptq.producer.clients.connecting import server_url
from promptq.producer.jobs.batch_dispatcher import Dispatcher
from promptq.producer.jobs.earlier_webhooks import take_over
from promptq.producer.jobs.rq_jobs import (
    REAP,
    ROLL_UP,
    SWEEP,
    batch_queue,
    enqueue_upkeep,
    open_jobs_redis,
    upkeep_queue,
)
from promptq.producer.jobs.upkeep import REAP_SECONDS
from promptq.producer.settings.jobs import JobsSettings
from promptq.producer.webhooks.deliveries import Deliveries
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.maxmemory_policy import MaxmemoryLog, maxmemory_warning
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.spoilt import errors_logged, note
from promptq.shared.server.connection import open_redis
from promptq.shared.server.retry import note_failure

_TICK_SECONDS = 0.25
_BACKOFF_SECONDS = 1.0
_END_SECONDS = 30.0
_UPKEEP = ((REAP_SECONDS, REAP), (600, SWEEP), (60, ROLL_UP))
"""For each job of upkeep, the seconds between two runs."""


def lead(settings: JobsSettings, is_over: Callable[[], bool]) -> None:
    """Waits until this process leads, then leads, until `is_over` returns True."""
    with open_redis(server_url(settings.redis_url)) as own, open_jobs_redis(settings) as jobs:
        dispatcher = Dispatcher(own, batch_queue(settings.queue, jobs), settings)
        deliveries = Deliveries(own, settings)
        upkeep_jobs, due = upkeep_queue(settings.queue, jobs), dict.fromkeys(_UPKEEP, 0.0)
        queue, maxmemory_log = RequestQueue(own, settings.queue), MaxmemoryLog()

        def look_at_maxmemory_policy() -> None:
            if maxmemory_log.is_due:
                maxmemory_log.note(queue.run(maxmemory_warning()))

        def enqueue_due_upkeep() -> None:
            now = time.monotonic()
            for seconds, job in [entry for entry in _UPKEEP if due[entry] <= now]:
                with errors_logged(job.__name__):
                    enqueue_upkeep(upkeep_jobs, job, settings.queue)
                due[seconds, job] = now + seconds

        steps = (
            look_at_maxmemory_policy,
            lambda: take_over(jobs, own, Keys(settings.queue)),
            deliveries.go_on,
            dispatcher.hand_out_batches,
            enqueue_due_upkeep,
        )
        while not is_over():
            try:
                leads, all_worked = dispatcher.leads(), True
            except redis.RedisError as error:
                note_failure(error)
                leads = all_worked = False
            all_worked &= _do_each(steps if leads else [deliveries.pause])
            deliveries.wait(_TICK_SECONDS if all_worked else _BACKOFF_SECONDS)
        with suppress(redis.RedisError):
            deliveries.close(_END_SECONDS)
        with suppress(redis.RedisError):
            dispatcher.step_down()


def _do_each(steps: Iterable[Callable[[], object]]) -> bool:
    """Calls all steps, even if one fails. Returns whether all succeeded."""
    all_worked = True
    for step in steps:
        try:
            step()
        except redis.RedisError as error:
            note_failure(error)
            all_worked = False
        except Exception as error:  # the other steps serve other records
            note(error, "a step of the jobs failed")
            all_worked = False
    return all_worked
