"""`promptq jobs` in simulated processes: leaders, and the worker of RQ that runs their upkeep."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import redis
import rq.utils
from rq import SimpleWorker
from rq.timeouts import BaseDeathPenalty

from promptq.producer.jobs import rq_jobs
from promptq.producer.jobs.leader import lead
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.errors import RedisSideError
from tests.programs.simulation import blocking
from tests.programs.simulation.blocking import BlockingThread
from tests.programs.simulation.loop import Process
from tests.programs.simulation.processes import QUEUE, URL

_TICK_SECONDS = 0.25
_BACKOFF_SECONDS = 1.0  # as in jobs/process.py

Work = Callable[[JobsSettings, Callable[[], bool]], None]


class JobsProgram:
    """A process of `promptq jobs`. Its parent starts it again after an error of the server."""

    def __init__(
        self, process: Process, _rng: random.Random, *, work: Work, folder: Path, lease_ms: int
    ) -> None:
        self.process = process
        self._work = work
        self._settings = JobsSettings(
            redis_url=URL,
            queue=QUEUE,
            lease_ms=lease_ms,
            max_crashes=1000,
            files_dir=folder,
        )
        self._is_over = False
        self.thread = BlockingThread(process, self._run)
        self.main = self.thread.main

    def drain(self) -> None:
        self._is_over = True

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._work(self._settings, lambda: self._is_over)
            except (redis.RedisError, RedisSideError) as error:
                self.process.loop.tell(self.process, f"begins anew after {error!r}")
                time.sleep(_BACKOFF_SECONDS)


def run_upkeep(settings: JobsSettings, is_over: Callable[[], bool]) -> None:
    """Run the jobs of upkeep that leaders have enqueued, until `is_over` returns True."""
    with rq_jobs.open_jobs_redis(settings) as connection:
        queue = rq_jobs.upkeep_queue(settings.queue, connection)
        while not is_over():
            if queue.count:
                rq_jobs.run_worker(queue, settings, burst=True)
            time.sleep(_TICK_SECONDS)


class _NoDeathPenalty(BaseDeathPenalty):  # type: ignore[misc]
    def setup_death_penalty(self) -> None:
        """Does nothing: a job of upkeep has no limit of time in a world."""

    cancel_death_penalty = setup_death_penalty


class _InlineWorker(rq_jobs.ListedWorker):
    """A worker that runs a job in its own process, and gets no signals."""

    death_penalty_class = _NoDeathPenalty
    execute_job = SimpleWorker.execute_job

    def _install_signal_handlers(self) -> None:
        """Does nothing."""


class _Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return datetime.datetime.fromtimestamp(time.time(), tz)


LEAD: Work = lead
UPKEEP: Work = run_upkeep

blocking.install()
rq_jobs.ListedWorker = _InlineWorker  # type: ignore[misc]
rq.utils.datetime = SimpleNamespace(  # type: ignore[attr-defined]
    datetime=_Datetime, timezone=datetime.timezone
)
