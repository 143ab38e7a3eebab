"""`promptq jobs`: RQ workers, RQ's cron and scheduler, and what feeds them, until told to stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import FrameType

import redis
from rq import Queue
from rq.exceptions import StopRequested

from promptq.producer.clients.connecting import server_url
from promptq.producer.jobs import upkeep
from promptq.producer.jobs.dispatching import Dispatcher
from promptq.producer.jobs.rq_queues import (
    JobScheduler,
    JsonCron,
    batch_queue,
    open_jobs_redis,
    run_worker,
    upkeep_queue,
    webhook_queue,
)
from promptq.producer.settings import JobsSettings
from promptq.producer.webhooks.webhook_signature import load_secret, secret_file
from promptq.shared.errors import RedisUnavailableError
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.settings import ENV_PREFIX
from promptq.shared.server.connection import open_redis, without_password

_TICK_SECONDS = 0.25
_SCHEDULE_SECONDS = 1.0
_BACKOFF_SECONDS = 1.0
_END_SECONDS = 30.0

MakeQueue = Callable[[str, redis.Redis], Queue]


def run_jobs(settings: JobsSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises PromptqError if that cannot begin."""
    load_secret(settings)
    _export(settings)
    stop = _StopSignal()
    workers = _Workers(settings)
    try:
        with (
            _open_when_there(settings, lambda: open_redis(server_url(settings.redis_url))) as own,
            _open_when_there(settings, lambda: open_jobs_redis(settings)) as jobs,
        ):
            webhooks = webhook_queue(settings.queue, jobs)
            dispatcher = Dispatcher(own, webhooks, batch_queue(settings.queue, jobs), settings)
            cron = JsonCron(upkeep_queue(settings.queue, jobs))
            cron.every(upkeep.REAP_SECONDS, upkeep.reap, settings.queue)
            cron.every(upkeep.SWEEP_SECONDS, upkeep.sweep, settings.queue)
            cron.every(upkeep.ROLL_UP_SECONDS, upkeep.roll_up, settings.queue)
            scheduler = JobScheduler(webhooks)
            workers.start()
            _tell_ready(settings)
            scheduled = 0.0
            while not stop.is_set:
                workers.look_after()
                try:
                    if dispatcher.leads():
                        dispatcher.hand_out_webhooks()
                        dispatcher.hand_out_batches()
                        cron.enqueue_jobs()
                        if time.monotonic() - scheduled > _SCHEDULE_SECONDS:
                            scheduled = time.monotonic()
                            scheduler.run_once()
                except redis.RedisError as error:
                    get_logger().warning("the server is away", reason=str(error))
                    stop.wait(_BACKOFF_SECONDS)
                stop.wait(_TICK_SECONDS)
            workers.stop()
            with suppress(redis.RedisError):
                dispatcher.step_down()
                scheduler.stop()
    finally:
        workers.stop()


def _open_when_there(settings: JobsSettings, connect: Callable[[], redis.Redis]) -> redis.Redis:
    """A server that may be started at the same time."""
    until = time.monotonic() + settings.redis_wait
    while True:
        try:
            return connect()
        except RedisUnavailableError:
            if time.monotonic() > until:
                raise
            time.sleep(_TICK_SECONDS)


def _export(settings: JobsSettings) -> None:
    """Jobs run in other processes, which read their settings from the environment."""
    given = settings.model_dump(exclude_defaults=True, exclude={"webhook_secret"})
    for name, value in given.items():
        os.environ[ENV_PREFIX + name.upper()] = str(value)


def _tell_ready(settings: JobsSettings) -> None:
    where = without_password(server_url(settings.redis_url))
    secret = "" if settings.webhook_secret else f", webhooks signed by {secret_file(settings)}"
    print(
        f"ready, queue {settings.queue} at {where}, files in {settings.files_dir}{secret}",
        flush=True,
    )


class _StopSignal:
    """Set by SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True

    def wait(self, seconds: float) -> None:
        """Sleep so long at most."""
        until = time.monotonic() + seconds
        while not self.is_set and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _TICK_SECONDS))


@dataclass
class _Place:
    make_queue: MakeQueue
    process: BaseProcess | None = None
    started: float = 0.0


class _Workers:
    """RQ's workers, each a process that ends with this one, however it ends."""

    def __init__(self, settings: JobsSettings) -> None:
        self._settings = settings
        self._places = [
            _Place(upkeep_queue),
            *(_Place(webhook_queue) for _ in range(settings.webhook_workers)),
            *(_Place(batch_queue) for _ in range(settings.batch_workers)),
        ]
        self._reading, self._writing = os.pipe()
        """Nothing is ever written: the reading end hears that the writing end is gone."""

    def start(self) -> None:
        for place in self._places:
            self._start(place)

    def look_after(self) -> None:
        """Start those again that died."""
        for place in self._places:
            is_dead = place.process is not None and not place.process.is_alive()
            if is_dead and time.monotonic() - place.started > _BACKOFF_SECONDS:
                get_logger().warning("a worker died")
                self._start(place)

    def stop(self) -> None:
        """End them: a batch stops where it is, a webhook gets the time it needs."""
        running = [it.process for it in self._places if it.process and it.process.is_alive()]
        for process in running:
            process.terminate()
        until = time.monotonic() + _END_SECONDS
        for process in running:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _start(self, place: _Place) -> None:
        context = multiprocessing.get_context("fork")
        place.started = time.monotonic()
        place.process = context.Process(target=self._work, args=(place.make_queue,))
        place.process.start()

    def _work(self, make_queue: MakeQueue) -> None:
        os.close(self._writing)
        os.setpgrp()  # Ctrl-C is for the parent, which then ends its workers
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=_end_with_parent, args=(self._reading,), daemon=True).start()
        try:
            run_worker(make_queue(self._settings.queue, open_jobs_redis(self._settings)))
        except (redis.ConnectionError, redis.TimeoutError, RedisUnavailableError) as error:
            get_logger().warning("a worker lost the server", reason=str(error))
            sys.exit(1)
        except StopRequested:  # told to stop while it ended by itself
            sys.exit(1)


def _end_with_parent(reading: int) -> None:
    os.read(reading, 1)
    os.kill(os.getpid(), signal.SIGTERM)
