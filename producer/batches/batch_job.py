"""The RQ job that runs one batch of the API, from its input file to its output files.

The job may be killed at any time. The next run repeats the unfinished step, but no finished line.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio

from promptq.producer.batch_store.batch_records import (
    LONGEST_WINDOW,
    Batches,
    BatchMissingError,
    BatchRecord,
    Status,
)
from promptq.producer.batch_store.files import FileMissingError, FileStore
from promptq.producer.batch_store.input_file import BatchFileError, count_lines
from promptq.producer.batch_store.line_order import lines_by_prefix
from promptq.producer.batches.batch_journal import BatchIsRunningError, Journal
from promptq.producer.batches.batch_run import LINES_AHEAD, BatchRun
from promptq.producer.batches.run_options import BatchProgress, Ending, RunOptions, stop_signals
from promptq.producer.calls.picture_urls import PictureFetcher
from promptq.producer.calls.queues import ServedQueues, log_unreadable
from promptq.producer.clients.async_client import AsyncClient
from promptq.producer.clients.connecting import server_url
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.connection import open_async_redis

T = TypeVar("T")

_LOOK_SECONDS = 0.5
_SHORTEST_TURN_SECONDS = 5.0
"""A batch that only waits for its key's rate limits runs at least this many seconds before another
batch may replace it. Without this minimum, such batches would constantly replace each other."""

LEASE_MS = 15_000
"""Milliseconds for which a process may run a batch before it must renew its lease."""


def run_batch_job(settings: JobsSettings, batch_id: str, stop_pipe: int | None = None) -> str:
    """Runs a batch to its end, unless another process runs it. Returns the batch's status.

    When the other end of the pipe `stop_pipe` closes, the run stops; another run can continue it.
    """
    return asyncio.run(_run(settings, batch_id, stop_pipe))


async def _run(settings: JobsSettings, batch_id: str, stop_pipe: int | None) -> str:
    async with await open_async_redis(server_url(settings.redis_url)) as connection:
        job = _BatchJob(settings, connection, batch_id, stop_pipe)
        if not await job.lease.hold():
            return "another process runs it"
        # If this raises, the lease expires by itself, so that the next try does not come at once.
        try:
            ended = await job.run()
        except BatchIsRunningError:
            return "another process runs it"
        finally:
            job.close()
        with suppress(redis.RedisError):
            await job.lease.hold(0)
        return ended


class _BatchJob:
    def __init__(
        self,
        settings: JobsSettings,
        connection: redis.asyncio.Redis,
        batch_id: str,
        stop_pipe: int | None,
    ) -> None:
        queue = AsyncRequestQueue(connection, settings.queue)
        self.lease = RunnerLease(queue, batch_id)
        self._settings = settings
        self._connection = connection
        self._batches = Batches(queue)
        self._batch_id = batch_id
        self._store = FileStore(settings.files_dir)
        self._pictures = PictureFetcher(self._store, LINES_AHEAD)
        self._log = get_logger(batch_id=batch_id)
        self._stopped = stop_signals(stop_pipe)
        self._began = self._looked = self._renewed = time.monotonic()
        self._reported: BatchProgress | None = None

    def close(self) -> None:
        self._pictures.close()

    async def run(self) -> str:
        try:
            record = await self._batches.get(self._batch_id)
        except BatchMissingError as error:
            self._log.warning("batch entry removed", reason=str(error))
            await self._batches.forget(self._batch_id)
            return "unknown"
        if record.is_final:
            await self._batches.forget(self._batch_id)
            return record.status
        if record.status != "finalizing":
            source = self._running("input")
            try:
                await self._in_thread(self._store.keep, record.input_file_id, record.tenant, source)
                total = await self._in_thread(count_lines, source)
            except FileMissingError:
                return await self._fail("input_file_missing", "the input file was deleted")
            except BatchFileError as error:
                return await self._fail(error.code, str(error))
            if not await self._run_lines(record, source, total):
                return "stopped"
            record = await self._batches.get(self._batch_id)
        try:
            return await self._finalize(record)
        except FileNotFoundError:
            return await self._fail("output_missing", "the answers were deleted while it ran")

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        """Calls a function in a thread. Meanwhile, renews the lease of the batch."""
        work = asyncio.create_task(asyncio.to_thread(call, *args))
        while not (await asyncio.wait([work], timeout=LEASE_MS / 4000))[0]:
            with suppress(redis.RedisError):  # `_look` notices a lost lease
                await self.lease.hold()
        return work.result()

    async def _run_lines(self, record: BatchRecord, source: Path, total: int) -> bool:
        """Runs the lines of the batch. Returns False if another process must continue the batch."""
        self._log.info("batch begins", total=total)
        await self._batches.update(
            record.id,
            status="in_progress",
            in_progress_at=record.in_progress_at or int(time.time()),
            total=total,
        )
        lines = await self._in_thread(lines_by_prefix, source)
        with Journal(record.id, self._running("output"), self._running("errors")) as journal:
            settings, caller = self._settings, record.caller
            defaults: dict[str, Any] = {
                "priority": max(settings.batch_priority, caller.highest_priority)
            }
            if record.completion_window != LONGEST_WINDOW:
                defaults["completion_window"] = record.completion_window
            options = RunOptions(
                endpoint=record.endpoint,
                max_in_flight=settings.batch_in_flight,
                defaults=defaults,
                caller=caller,
                fetch=partial(self._pictures.fetch, caller=caller),
                expires_at=record.expires_at,
                retry_seconds=settings.redis_retry_seconds,
            )
            run = BatchRun(
                record.id,
                self._queues(record),
                lines,
                total,
                journal,
                options,
                self._stopped,
            )
            ending = await run.run(lambda: self._look(record, run, journal))
            progress, usage = run.progress(), journal.usage
        self._log.info("batch ends", ending=ending.value, failed=progress.failed)
        if ending is Ending.STOPPED:
            return False
        await self._batches.update(
            record.id,
            status="finalizing",
            ending=ending,
            finalizing_at=int(time.time()),
            completed=progress.completed,
            failed=progress.failed,
            usage=usage.model_dump(),
        )
        return True

    def _queues(self, record: BatchRecord) -> ServedQueues:
        return ServedQueues(
            lambda name: AsyncClient(self._connection, name),
            [self._settings.queue, *record.queues],
            on_unreadable=log_unreadable,
        )

    async def _look(self, record: BatchRecord, run: BatchRun, journal: Journal) -> Ending | None:
        now = time.monotonic()
        if self._reported is not None and now - self._looked < _LOOK_SECONDS:
            return None
        self._looked = now
        if now - self._renewed > LEASE_MS / 4000:
            if not await self.lease.hold():
                return Ending.STOPPED
            self._renewed = now
        if (progress := run.progress()) != self._reported:
            await self._batches.update(
                record.id,
                completed=progress.completed,
                failed=progress.failed,
                usage=journal.usage.model_dump(),
            )
            self._reported = progress
        if await self._batches.is_cancelling(record.id):
            return Ending.CANCELLED
        if time.time() >= record.expires_at:
            return Ending.EXPIRED
        return Ending.STOPPED if await self._gives_way(record, run) else None

    async def _gives_way(self, record: BatchRecord, run: BatchRun) -> bool:
        """Returns whether this run must stop so that a batch of another tenant can run.

        After `batch_turn_seconds`, a batch stops if a tenant with fewer running batches waits. A
        batch that only waits for its key's rate limits stops sooner, if any other tenant waits.
        """
        has_run, turn = time.monotonic() - self._began, self._settings.batch_turn_seconds
        only_waits = run.only_waits and has_run >= min(turn, _SHORTEST_TURN_SECONDS)
        if not only_waits and has_run < turn:
            return False
        waiting, running = await self._batches.turns()
        own = record.tenant_as_written
        return any(only_waits or running[each] < running[own] for each in waiting if each != own)

    async def _finalize(self, record: BatchRecord) -> str:
        """Stores the output and error files, unless an earlier process did. Returns the status."""
        changes: dict[str, Any] = {}
        parts = (
            ("output", record.completed, "0", "output_file_id"),
            ("errors", record.failed, "1", "error_file_id"),
        )
        for name, count, digit, field in parts:
            running = self._running(name)
            if count:
                stored = self._store.add(
                    running,
                    filename=f"{record.id}_{name}.jsonl",
                    purpose="batch_output",
                    tenant=record.tenant,
                    ttl_seconds=record.output_ttl_seconds,
                    file_id=f"file-{record.id.removeprefix('batch_')}{digit}",
                )
                changes[field] = stored.id
            running.unlink(missing_ok=True)
        status = record.ending or "completed"
        await self._end(status, **changes)
        return status

    async def _fail(self, code: str, message: str) -> str:
        self._log.warning("batch fails", code=code, reason=message)
        error = {"code": code, "message": message, "param": "input_file_id", "line": None}
        await self._end("failed", errors=[error])
        return "failed"

    async def _end(self, status: Status, **changes: Any) -> None:
        source = self._running("input")
        for path in source.parent.glob(f"{source.name}*"):  # also copies of killed processes
            path.unlink(missing_ok=True)
        await self._batches.end(self._batch_id, status, **changes)

    def _running(self, name: str) -> Path:
        return self._settings.files_dir / "running" / f"{self._batch_id}.{name}.jsonl"


class RunnerLease:
    """The right to run a batch. Only one process has the right, and renews it within LEASE_MS."""

    def __init__(self, queue: AsyncRequestQueue, batch_id: str) -> None:
        self._queue = queue
        self._key = queue.keys.batch_runner(batch_id)
        self._holder = secrets.token_hex(8)

    async def hold(self, ttl_ms: int = LEASE_MS) -> bool:
        """Acquires or renews the lease for `ttl_ms`, or ends it if `ttl_ms` is 0. Returns whether
        this process has the lease."""
        call = scripts.hold(self._queue.keys, self._key, self._holder, ttl_ms)
        return await self._queue.run(call)
