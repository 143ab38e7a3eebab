"""Runs the lines of a batch: so many at a time, each once, whoever crashes in between.

A line's request has an id made of the batch's id and the line's number. What an earlier process
enqueued is therefore found again, waiting, running or finished, and not enqueued a second time;
what it wrote down is not even asked for. Results are asked for in one call for all that is in
flight, since nobody reads a batch's tokens one by one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import redis
import redis.asyncio

from producer.jobs.batch_journal import Journal
from producer.jobs.batch_lines import BatchLine, BrokenLineError, LineReader, request_id_of
from producer.jobs.line_requests import LineForm
from shared.errors import (
    InvalidRequestError,
    QueueFullError,
    RedisSideError,
    RequestExistsError,
)
from shared.events import Result
from shared.keys import Keys
from shared.request_queue import AsyncRequestQueue
from shared.schemas import FinishReason, RequestState
from shared.script_values import NewRequest

T = TypeVar("T")

_FIRST_WAIT_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 0.5
_LONGEST_FULL_SECONDS = 5.0
_KEPT_MS = 120_000
"""So long a request whose answer is written down is still there for whoever looks; all of a large
batch would fill the server."""
_END_SECONDS = 30.0
"""How long what was cancelled may take to end: a worker that died holds it for a lease."""


class Ending(StrEnum):
    """Why a run is over."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    STOPPED = "stopped"
    """The process is to end; another one may go on."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is. `total` lines, `completed` in the output, `failed` in the error file."""

    total: int
    completed: int
    failed: int
    in_flight: int


@dataclass(slots=True)
class _InFlight:
    line: BatchLine
    request_id: str
    requests: list[NewRequest]
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def open_requests(self) -> list[NewRequest]:
        return [new for new in self.requests if new.request_id not in self.results]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a batch is run."""

    endpoint: str | None = None
    """Only lines for this URL are taken; None: any."""
    max_in_flight: int = 128
    defaults: dict[str, Any] = field(default_factory=dict)
    """Fields of each request that its line may override."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields that no line may override, such as the tenant."""
    highest_priority: int | None = None
    """The lowest number, so the soonest place, that a line may ask for."""
    expires_at: float | None = None
    """Unix seconds at which the batch's window ends; what is in the queue then ends there."""
    retry_seconds: float = 60.0
    """How long a server that is away is waited for, before its error is raised."""


def _is_final(state: bytes) -> bool:
    return RequestState(state.decode()).is_final


class BatchRun:
    """One process's run of a batch, up to its end or until it is told to stop."""

    def __init__(
        self,
        batch_id: str,
        connection: redis.asyncio.Redis,
        queue: str,
        lines: Iterable[tuple[int, bytes]],
        total: int,
        journal: Journal,
        form: LineForm,
        options: RunOptions,
        on_progress: Callable[[Progress], object] = lambda _: None,
    ) -> None:
        self._batch_id = batch_id
        self._redis: Any = connection
        self._queue = AsyncRequestQueue(connection, queue)
        self._keys = Keys(queue)
        self._lines = self._lines_to_run(lines, LineReader(options.endpoint))
        self._held_back: list[_InFlight] = []
        self._total = total
        self._journal = journal
        self._form = form
        self._options = options
        self._on_progress = on_progress
        self._in_flight: dict[int, _InFlight] = {}
        self._full_until = 0.0
        self._written: list[NewRequest] = []

    async def run(self, look: Callable[[], Awaitable[Ending | None]]) -> Ending:
        """Run what is not done yet; `look` says, between two rounds, whether to end before.

        Raises redis.RedisError or RedisSideError if the server stays away; a later run goes on
        from there.
        """
        wait = _FIRST_WAIT_SECONDS
        while True:
            ending = await self._persist(look)
            if ending is not None:
                await self._end(ending)
                return ending
            await self._fill()
            if not self._in_flight and not self._held_back:
                self._tell()
                return Ending.COMPLETED
            ended = await self._collect()
            self._tell()
            await self._let_go()
            wait = _FIRST_WAIT_SECONDS if ended else min(wait * 1.5, _LONGEST_WAIT_SECONDS)
            await asyncio.sleep(wait)

    def progress(self) -> Progress:
        journal = self._journal
        return Progress(
            self._total, journal.num_completed, journal.num_failed, len(self._in_flight)
        )

    def _tell(self) -> None:
        self._journal.flush()
        self._on_progress(self.progress())

    def _lines_to_run(
        self, lines: Iterable[tuple[int, bytes]], reader: LineReader
    ) -> Iterator[_InFlight]:
        """Lines that are not done; those that are no requests are written down as errors."""
        for number, raw in lines:
            is_done = number in self._journal.done
            try:
                line = reader.parse(number, raw)
            except BrokenLineError as error:
                if not is_done:
                    self._journal.add_error(number, error.custom_id, error.code, str(error))
                continue
            if is_done:
                continue
            request_id = request_id_of(self._batch_id, line)
            try:
                requests = self._form.requests(line, request_id, dict(self._options.defaults))
                requests = [self._restrict(new) for new in requests]
            except InvalidRequestError as error:
                self._refuse(line, request_id, 400, "invalid_request_error", error)
                continue
            yield _InFlight(line, request_id, requests)

    def _restrict(self, new: NewRequest) -> NewRequest:
        """The request without what a line may not ask for."""
        options, changes = self._options, dict(self._options.overrides)
        changes["idempotency_key"] = None  # the id says it already
        if options.highest_priority is not None:
            changes["priority"] = max(new.request.priority, options.highest_priority)
        if options.expires_at is not None:
            left = max(1, int((options.expires_at - time.time()) * 1000))
            changes["deadline_ms"] = min(new.request.deadline_ms or left, left)
        request = new.request.model_copy(update=changes)
        return NewRequest(new.request_id, request, new.delay_ms)

    async def _fill(self) -> None:
        while len(self._in_flight) < self._options.max_in_flight:
            if time.monotonic() < self._full_until:
                return
            item = self._held_back.pop() if self._held_back else next(self._lines, None)
            if item is None:
                return
            if await self._enqueue(item, item.requests):
                self._in_flight[item.line.number] = item

    async def _enqueue(self, item: _InFlight, requests: list[NewRequest]) -> bool:
        """Whether they are in the queue now, or were before; the item is held back otherwise."""
        try:
            await self._persist(partial(self._queue.enqueue, requests))
        except RequestExistsError:
            pass  # an earlier process enqueued it
        except QueueFullError as error:
            seconds = min(error.retry_after_ms / 1000, _LONGEST_FULL_SECONDS)
            self._full_until = time.monotonic() + seconds
            self._held_back.append(item)
            return False
        return True

    async def _collect(self) -> int:
        """Write down what has ended; gives how many lines."""
        asked = [(item, new) for item in self._in_flight.values() for new in item.open_requests]
        states = await self._ask("state", [new for _, new in asked])
        final = []
        for (item, new), state in zip(asked, states, strict=True):
            if state is None:  # the server lost it, or kept it no longer
                if not await self._enqueue(item, [new]):
                    self._in_flight.pop(item.line.number, None)
            elif _is_final(state):
                final.append((item, new))
        results = await self._ask("result", [new for _, new in final])
        for (item, new), result in zip(final, results, strict=True):
            if result is not None:
                item.results[new.request_id] = Result.model_validate_json(result)
        ended = [item for item in self._in_flight.values() if not item.open_requests]
        for item in ended:
            await self._write(item)
            del self._in_flight[item.line.number]
            self._written += item.requests
        return len(ended)

    async def _ask(self, name: str, requests: list[NewRequest]) -> list[bytes | None]:
        """One field of many requests' hashes."""

        async def ask() -> list[bytes | None]:
            pipeline = self._redis.pipeline(transaction=False)
            for new in requests:
                pipeline.hget(self._keys.request(new.request_id), name)
            answers: list[bytes | None] = await pipeline.execute()
            return answers

        return await self._persist(ask) if requests else []

    async def _let_go(self) -> None:
        """Shorten the life of what was written down, once that is safe."""
        done, self._written = self._written, []

        async def shorten() -> None:
            pipeline = self._redis.pipeline(transaction=False)
            for new in done:
                if new.request.webhook_url is None:
                    pipeline.pexpire(self._keys.request(new.request_id), _KEPT_MS, lt=True)
            await pipeline.execute()

        if done:
            await self._persist(shorten)

    async def _write(self, item: _InFlight) -> None:
        line = item.line
        results = [item.results[new.request_id] for new in item.requests]
        for result in results:
            match result.finish_reason:
                case FinishReason.ERROR:
                    error = result.error
                    kind = error.type if error else "internal_error"
                    status = 400 if kind in ("invalid_request", "unsupported") else 500
                    kind = "invalid_request_error" if status == 400 else "server_error"
                    message = error.message if error else "the request failed without a reason"
                    body = {"message": message, "type": kind, "param": None, "code": None}
                    return self._journal.add_refusal(
                        line.number, line.custom_id, item.request_id, status, {"error": body}
                    )
                case FinishReason.EXPIRED if self._is_over:
                    return self._expire(line)
                case FinishReason.CANCELLED | FinishReason.EXPIRED as reason:
                    return self._journal.add_error(
                        line.number,
                        line.custom_id,
                        f"request_{reason}",
                        f"the request was {reason}",
                    )
        answer = await self._persist(partial(self._form.answer, line, item.request_id, results))
        return self._journal.add_answer(line.number, line.custom_id, item.request_id, answer)

    def _refuse(
        self, line: BatchLine, request_id: str, status: int, kind: str, error: InvalidRequestError
    ) -> None:
        body = {"message": str(error), "type": kind, "param": error.field or None, "code": None}
        self._journal.add_refusal(line.number, line.custom_id, request_id, status, {"error": body})

    @property
    def _is_over(self) -> bool:
        return self._options.expires_at is not None and time.time() >= self._options.expires_at

    def _expire(self, line: BatchLine) -> None:
        self._journal.add_error(
            line.number,
            line.custom_id,
            "batch_expired",
            "the request was not finished before the batch's window ended",
        )

    async def _end(self, ending: Ending) -> None:
        """End what is in flight, unless another process is to go on with it."""
        if ending is not Ending.STOPPED:
            await self._cancel_all()
        if ending is Ending.EXPIRED:
            for item in chain(self._in_flight.values(), self._held_back, self._lines):
                self._expire(item.line)
        self._in_flight.clear()
        self._tell()

    async def _cancel_all(self) -> None:
        """Cancel what is in flight, but keep what ends by itself before that takes effect."""
        await self._collect()
        left = [new for item in self._in_flight.values() for new in item.open_requests]
        for new in left:
            await self._persist(partial(self._queue.cancel, new.request_id))
        until = time.monotonic() + _END_SECONDS
        while left and time.monotonic() < until:
            states = await self._ask("state", left)
            pairs = zip(left, states, strict=True)
            left = [new for new, state in pairs if state is not None and not _is_final(state)]
            await asyncio.sleep(_FIRST_WAIT_SECONDS * 5)

    async def _persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Try again while the server is away or refuses; all calls here may be repeated."""
        until: float | None = None
        while True:
            try:
                return await call()
            except (redis.RedisError, RedisSideError):
                until = until or time.monotonic() + self._options.retry_seconds
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_LONGEST_WAIT_SECONDS)
