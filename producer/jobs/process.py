"""`promptq jobs`: a leader process, RQ workers, and a parent that restarts processes that die."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import redis
from redis.exceptions import NoPermissionError
from rq.exceptions import StopRequested

from promptq.producer.clients.connecting import server_url
from promptq.producer.jobs.leader import lead
from promptq.producer.jobs.rq_jobs import (
    MakeQueue,
    batch_queue,
    open_jobs_redis,
    run_worker,
    upkeep_queue,
)
from promptq.producer.settings.jobs import JobsSettings
from promptq.producer.webhooks.webhook_signature import WebhookSecrets, master_file
from promptq.shared.errors import RedisSideError, RedisUnavailableError
from promptq.shared.queue import scripts
from promptq.shared.queue.call import Call
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.acl import user_name
from promptq.shared.server.connection import explain, open_redis, without_password
from promptq.shared.server.retry import note_failure

_TICK_SECONDS = 0.25
_BACKOFF_SECONDS = 1.0
_END_SECONDS = 40.0
_NOT_SERVED = os.EX_TEMPFAIL
"""Exit code of a process whose Redis server is down or refuses a command."""
_LOG_AGAIN_SECONDS = 60.0

Work = Callable[[JobsSettings], None]


def run_jobs(settings: JobsSettings) -> None:
    """Runs the jobs until SIGTERM or SIGINT. Raises PromptqError if the start fails."""
    has_shared_secret = WebhookSecrets(settings).has_shared
    stop_requested = _stop_signal()
    url = server_url(settings.redis_url)
    with _open_when_there(settings, lambda: open_redis(url)) as own:
        queue = RequestQueue(own, settings.queue)
        seen = Call("", ["HEXISTS", queue.keys.upkeep, "seen"], bool)
        _check_rights(settings, url, partial(queue.run, [seen, scripts.try_channels()]))
    with _open_when_there(settings, lambda: open_jobs_redis(settings)) as jobs:
        waiting = upkeep_queue(settings.queue, jobs).key
        _check_rights(settings, settings.jobs_redis_url or url, partial(jobs.llen, waiting))
    if has_shared_secret:
        get_logger().warning(
            "the shared secret also signs the webhooks of all tenants: give each receiver its"
            " tenant's secret, then remove the shared one (docs/jobs.md, Secrets)"
        )
    processes = _Processes(settings)
    try:
        processes.look_after()
        _print_ready(settings)
        while not stop_requested():
            processes.look_after()
            time.sleep(_TICK_SECONDS)
    finally:
        processes.stop()


def _open_when_there(settings: JobsSettings, connect: Callable[[], redis.Redis]) -> redis.Redis:
    """Connects to a server. Waits up to `redis_wait` seconds for its first answer."""
    until = time.monotonic() + settings.redis_wait
    while True:
        try:
            return connect()
        except RedisUnavailableError:
            if time.monotonic() > until:
                raise
            time.sleep(_TICK_SECONDS)


def _check_rights(settings: JobsSettings, url: str, try_out: Callable[[], object]) -> None:
    """Calls `try_out`. Raises RedisAuthError if the user of `url` lacks a permission for this."""
    try:
        try_out()
    except NoPermissionError as error:
        role = user_name("jobs", settings.queue)
        wrong = f"may not do what `promptq jobs` does; give it the URL of the user {role!r}"
        raise explain(error, url, f"{wrong} (promptq acl)") from None
    except redis.ResponseError:
        pass  # the key has a wrong type, which is logged later


def _print_ready(settings: JobsSettings) -> None:
    where = without_password(server_url(settings.redis_url))
    line = f"ready, queue {settings.queue} at {where}, files in {settings.files_dir}"
    if not settings.webhook_master_secret:
        line += f", webhooks signed by {master_file(settings)}"
    print(line, flush=True)


def _stop_signal() -> Callable[[], bool]:
    """Returns a function that returns whether SIGTERM or SIGINT has arrived."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    return lambda: bool(received)


@dataclass
class _Place:
    name: str
    work: Work
    process: BaseProcess | None = None
    started: float = 0.0


class _Processes:
    """The child processes. They end when this process ends, for any reason.

    This process has no thread and no connection, so it can fork at any time.
    """

    def __init__(self, settings: JobsSettings) -> None:
        self._settings = settings
        self._logged_at = -math.inf
        """Time of the last log line about a refusing server. New processes inherit this time, so
        that they do not all log a line."""
        self._reading, self._writing = os.pipe()
        """A pipe to which nothing is ever written. Only this process has the writing end. When that
        end closes, all other processes stop, including those that RQ starts for batches."""
        batches = _working(batch_queue, stop_pipe=self._reading)
        self._places = [
            _Place("leader", _lead),
            _Place("upkeep", _working(upkeep_queue)),
            *(_Place("batches", batches) for _ in range(settings.batch_workers)),
        ]

    def look_after(self) -> None:
        """Starts all processes, and restarts those that died."""
        for place in self._places:
            if place.process is not None:
                is_new = time.monotonic() - place.started <= _BACKOFF_SECONDS
                if is_new or place.process.is_alive():
                    continue
                if place.process.exitcode != _NOT_SERVED:
                    get_logger().warning("a process died", process=place.name)
                elif self._is_log_due:
                    self._logged_at = time.monotonic()
            place.started = time.monotonic()
            context = multiprocessing.get_context("fork")
            place.process = context.Process(target=self._work, args=(place.work,))
            place.process.start()

    @property
    def _is_log_due(self) -> bool:
        return time.monotonic() >= self._logged_at + _LOG_AGAIN_SECONDS

    def stop(self) -> None:
        """Stops all processes. A later run continues stopped batches. Webhook calls may finish."""
        os.close(self._writing)
        until = time.monotonic() + _END_SECONDS
        for process in [place.process for place in self._places if place.process is not None]:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _work(self, work: Work) -> None:
        os.close(self._writing)
        os.setpgrp()  # Ctrl-C is for the parent, which then ends its children
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=_stop_with_parent, args=(self._reading,), daemon=True).start()
        _carry_out(work, self._settings, logs_error=self._is_log_due)


def _carry_out(work: Work, settings: JobsSettings, logs_error: bool) -> None:
    """Runs the work of a process. If the server is down or refuses a command, the process exits
    without a traceback. With `logs_error`, it first logs a warning."""
    try:
        work(settings)
    except (redis.RedisError, RedisSideError) as error:
        if logs_error:
            note_failure(error)
        sys.exit(_NOT_SERVED)
    except StopRequested:  # a stop signal came while the worker ended by itself
        sys.exit(1)


def _lead(settings: JobsSettings) -> None:
    lead(settings, _stop_signal())
    os._exit(0)  # do not wait for threads whose receivers do not answer


def _working(make_queue: MakeQueue, **arguments: Any) -> Work:
    def work(settings: JobsSettings) -> None:
        run_worker(make_queue(settings.queue, open_jobs_redis(settings)), settings, **arguments)

    return work


def _stop_with_parent(reading: int) -> None:
    os.read(reading, 1)
    os.kill(os.getpid(), signal.SIGTERM)
