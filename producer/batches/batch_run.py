"""Runs the lines of a batch, several at a time and each exactly once, even after a crash.

The id of a line's request is made from the batch's id and the line's number. So a later process
finds the requests of an earlier process, in any state, and enqueues no request twice. Lines with a
written answer do not run again. One call reads the results of all requests in flight, because
nobody reads the tokens of a batch one by one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TypeVar

import redis
from redis.exceptions import AuthenticationError, NoPermissionError

from promptq.producer.batch_store.input_file import (
    BatchLine,
    BrokenLineError,
    LineReader,
    RefusedLineError,
)
from promptq.producer.batches.batch_journal import Journal
from promptq.producer.batches.line_requests import LineGateway, LineRequest
from promptq.producer.batches.run_options import BatchProgress, Ending, RunOptions
from promptq.producer.calls.queues import ServedQueues
from promptq.shared.errors import QueueFullError, RedisSideError, RequestExistsError
from promptq.shared.protocol.events import ErrorInfo, Result, Usage
from promptq.shared.protocol.request import FinishReason, NewRequest, RequestState
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call
from promptq.shared.queue.request_queue import AsyncRequestQueue

RequestOfLine = tuple[LineRequest, NewRequest]
"""A line, and one of its requests."""

T = TypeVar("T")
U = TypeVar("U")

LINES_AHEAD = 4
"""Number of lines that may wait for models or pictures at once."""
_FILL_SECONDS = 2.0
"""Seconds for enqueueing lines before results are read again. Fetching pictures may take long."""
_FIRST_WAIT_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 0.5
_LONGEST_FULL_SECONDS = 5.0
_LEAST_ANSWERS = 8
"""Number of answers from which their mean length is the expected length of a batch's next lines."""
_KEPT_MS = 120_000
"""Milliseconds after which Redis deletes an answered request, so that no batch fills Redis."""
_SYNC_SECONDS = 1.0
"""The shortest time in seconds between two syncs of the journal to the disk."""
_END_SECONDS = 30.0
"""The most seconds to wait for cancelled requests to end. If a request's worker has died, the
request ends only after the lease has expired."""
_UNFINISHED = {
    Ending.CANCELLED: (
        "batch_cancelled",
        "the batch was cancelled before the request was finished",
    ),
    Ending.EXPIRED: (
        "batch_expired",
        "the request was not finished before the batch's window ended",
    ),
}
"""OpenAI's error code and a message for the lines without an answer, by how the batch ended."""
_SPOILT = Result(
    text="",
    token_ids=[],
    finish_reason=FinishReason.ERROR,
    usage=Usage(),
    error=ErrorInfo(type="spoilt_record", message="its record in the queue was spoilt"),
)
"""The result that is used if a request's record in Redis breaks the protocol."""


class _StoppedError(Exception):
    """The run was stopped while the Redis server did not answer."""


class BatchRun:
    """One process's run of a batch, until the batch ends or `stopped` is set."""

    def __init__(
        self,
        batch_id: str,
        queues: ServedQueues,
        lines: Iterable[tuple[int, bytes]],
        total: int,
        journal: Journal,
        options: RunOptions,
        stopped: asyncio.Event,
        on_progress: Callable[[BatchProgress], object] = lambda _: None,
    ) -> None:
        self._gateway = LineGateway(batch_id, queues, options)
        self._lines = self._lines_to_run(lines, LineReader(options.endpoint))
        self._total = total
        self._journal = journal
        self._options = options
        self._stopped = stopped
        self._on_progress = on_progress
        self._ending: Ending | None = None
        self._in_flight: dict[int, LineRequest] = {}
        self._held_back: dict[int, LineRequest] = {}
        self._full_until: dict[str, float] = {}  # by queue
        self._is_at_end = False
        self._waits_for_rates = False
        self._wait_seconds = _FIRST_WAIT_SECONDS
        self._written: list[RequestOfLine] = []
        self._synced_at = time.monotonic()

    async def run(self, look: Callable[[], Awaitable[Ending | None]]) -> Ending:
        """Runs the lines that are not done yet. Returns how the run ended.

        Calls `look` before each round of reading results; `look` may return a reason to end. Raises
        redis.RedisError or RedisSideError if the server stays down. A later run can then continue.
        """
        try:
            while self._ending is None:
                await self._round(look)
            if self._ending in _UNFINISHED:
                await self._give_up(*_UNFINISHED[self._ending])
            await self._expire_written()
        except _StoppedError:
            self._ending = Ending.STOPPED
        finally:
            self._gateway.close()
        self._in_flight.clear()
        self._report()
        return self._ending

    def progress(self) -> BatchProgress:
        journal = self._journal
        return BatchProgress(
            self._total, journal.num_completed, journal.num_failed, len(self._in_flight)
        )

    @property
    def only_waits(self) -> bool:
        """Whether no line is in the queue, and the next lines wait for the caller's rate limits."""
        return self._waits_for_rates and not self._in_flight

    async def _round(self, look: Callable[[], Awaitable[Ending | None]]) -> None:
        self._ending = Ending.STOPPED if self._stopped.is_set() else await self._persist(look)
        if self._ending is not None:
            return
        await self._fill()
        if self._is_at_end and not self._in_flight and not self._held_back:
            self._ending = Ending.COMPLETED
            return
        ended = await self._collect()
        self._report()
        if time.monotonic() - self._synced_at > _SYNC_SECONDS:
            await self._expire_written()
        longer = min(self._wait_seconds * 1.5, _LONGEST_WAIT_SECONDS)
        self._wait_seconds = _FIRST_WAIT_SECONDS if ended else longer
        await asyncio.sleep(self._wait_seconds)

    def _report(self) -> None:
        self._journal.flush()
        self._on_progress(self.progress())

    async def _lines_to_run(
        self, lines: Iterable[tuple[int, bytes]], reader: LineReader
    ) -> AsyncIterator[LineRequest | None]:
        """Yields the lines to run. Yields None while the next lines wait for models or pictures.

        For a line that is not a request, writes an error instead.
        """
        parsed, waiting = self._parsed(lines, reader), list[BatchLine]()
        while True:
            waiting += islice(parsed, LINES_AHEAD - len(waiting))
            if not waiting:
                return
            num_waiting = len(waiting)
            for line in [*waiting]:
                try:
                    item = await self._persist(partial(self._gateway.of, line))
                except RefusedLineError as error:
                    self._journal.add_refusal(error)
                else:
                    if item is None:
                        continue
                    yield item
                waiting.remove(line)
            if len(waiting) < num_waiting or await self._gateway.has_fetched():
                continue
            if self._ending is None:
                yield None
                continue
            for line in waiting:
                self._journal.add_error(line.number, line.custom_id, *_UNFINISHED[self._ending])
            waiting.clear()

    def _parsed(
        self, lines: Iterable[tuple[int, bytes]], reader: LineReader
    ) -> Iterator[BatchLine]:
        """Yields the lines that are not done. For a broken line, writes an error instead."""
        for number, raw in lines:
            is_done = number in self._journal.done
            try:
                line = reader.parse(number, raw)  # the reader remembers the line's custom id
            except BrokenLineError as error:
                if not is_done:
                    self._journal.add_error(number, error.custom_id, error.code, str(error))
            else:
                if not is_done:
                    yield line

    async def _fill(self) -> None:
        until = time.monotonic() + _FILL_SECONDS
        while len(self._in_flight) < self._options.max_in_flight and time.monotonic() < until:
            item = self._first_held_back()
            if item is None:
                if len(self._held_back) >= self._options.max_in_flight:
                    return
                try:
                    item = await anext(self._lines)
                except StopAsyncIteration:
                    self._is_at_end = True
                    return
                if item is None:
                    return
                if self._is_full(item):
                    self._held_back[item.line.number] = item
                    continue
            try:
                seconds = await self._persist(partial(self._gateway.wait_for_rates, item))
            except RefusedLineError as error:
                self._journal.add_refusal(error)
                continue
            self._waits_for_rates = seconds > 0
            if seconds:
                self._hold_back(item, seconds)
            elif await self._enqueue(item, item.requests):
                self._in_flight[item.line.number] = item
            else:
                await self._refuse_if_too_large(item)

    def _first_held_back(self) -> LineRequest | None:
        for number, item in self._held_back.items():
            if not self._is_full(item):
                return self._held_back.pop(number)
        return None

    def _is_full(self, item: LineRequest) -> bool:
        return time.monotonic() < self._full_until.get(item.served.name, 0.0)

    async def _enqueue(self, item: LineRequest, requests: list[NewRequest]) -> bool:
        """Enqueues requests, unless an earlier process did. Returns False if the queue is full."""
        guessed = [self._with_guess(new, len(item.requests)) for new in requests]
        try:
            await self._persist(partial(item.served.queue.enqueue, guessed))
        except RequestExistsError:
            pass  # an earlier process enqueued the line
        except QueueFullError as error:
            self._hold_back(item, error.retry_after_ms / 1000)
            return False
        return True

    def _with_guess(self, new: NewRequest, num_choices: int) -> NewRequest:
        """Expects the mean output of the batch's answers, unless the line has a guess."""
        num_answers = self._journal.num_completed
        if num_answers < _LEAST_ANSWERS or new.request.expected_tokens is not None:
            return new
        guess = self._journal.usage.completion_tokens // (num_answers * num_choices)
        return replace(new, request=new.request.model_copy(update={"expected_tokens": guess}))

    def _hold_back(self, item: LineRequest, seconds: float) -> None:
        self._held_back[item.line.number] = item
        self._full_until[item.served.name] = time.monotonic() + min(seconds, _LONGEST_FULL_SECONDS)

    async def _refuse_if_too_large(self, item: LineRequest) -> None:
        """Refuses a postponed line if even the empty queue has no room for it."""
        queue = item.served.queue
        counts = [Call("", ["ZCARD", queue.keys.delayed], int), lookups.count(queue.keys)]
        if any(await self._persist(partial(queue.run, counts))):
            return
        try:
            await self._persist(partial(queue.enqueue, item.requests))
        except RequestExistsError:
            pass
        except QueueFullError as error:
            del self._held_back[item.line.number]
            del self._full_until[item.served.name]
            self._journal.add_refusal(self._gateway.too_large(item, error.limit))

    async def _collect(self) -> int:
        """Writes the answers of lines whose requests have ended. Returns the number of lines."""
        requests = [(item, new) for item in self._in_flight.values() for new in item.open_requests]
        states = await self._of_all(requests, _state_and_result)
        for (item, new), (state, result) in zip(requests, states, strict=True):
            if result is not None:
                item.results[new.request_id] = result
            # The server has lost the request, or the request has expired.
            is_lost = state is None and self._ending is None
            if is_lost and not await self._enqueue(item, [new]):
                self._in_flight.pop(item.line.number, None)
        ended = [item for item in self._in_flight.values() if not item.open_requests]
        for item in ended:
            await self._write(item)
            del self._in_flight[item.line.number]
            self._written += [(item, new) for new in item.requests]
        return len(ended)

    async def _of_all(
        self,
        parts: Sequence[tuple[LineRequest, U]],
        call: Callable[[AsyncRequestQueue, U], Call[T]],
    ) -> list[T]:
        """Runs `call(queue, part)` for each pair in `parts`: a line, and a part of it such as a
        request. Makes one round trip for each queue. Returns the replies in their order."""
        by_queue: dict[AsyncRequestQueue, list[int]] = {}
        for at, (item, _) in enumerate(parts):
            by_queue.setdefault(item.served.queue, []).append(at)
        results: dict[int, T] = {}
        for queue, places in by_queue.items():
            calls = [call(queue, parts[at][1]) for at in places]
            replies = await self._persist(partial(queue.run, calls))
            results.update(zip(places, replies, strict=True))
        return [results[at] for at in range(len(parts))]

    async def _expire_written(self) -> None:
        """Writes the journal to the disk. Then shortens the expiry of the new lines' requests, and
        of pictures that no other request needs. Leaves out requests with a webhook, and their
        pictures.

        Dead letters never expire, so that people can find out why the requests failed.
        """
        done, self._written = self._written, []
        self._synced_at = time.monotonic()
        if done:
            self._journal.sync()
            without = [line for line in done if line[1].request.webhook_url is None]
            kept = [(item, key) for item, new in without for key in _keys_of(item, new)]
            await self._of_all(kept, _shorten)

    async def _write(self, item: LineRequest) -> None:
        line = item.line
        reasons = [result.finish_reason for result in item.results.values()]
        for reason in (FinishReason.CANCELLED, FinishReason.EXPIRED):
            if reason in reasons and FinishReason.ERROR not in reasons:
                code, message = self._error_of_unfinished(reason)
                return self._journal.add_error(line.number, line.custom_id, code, message)
        try:
            answer = await self._persist(partial(self._gateway.answer, item))
        except RefusedLineError as error:
            return self._journal.add_refusal(error)
        return self._journal.add_answer(line.number, line.custom_id, item.request_id, answer)

    def _error_of_unfinished(self, reason: FinishReason) -> tuple[str, str]:
        if self._ending in _UNFINISHED:
            return _UNFINISHED[self._ending]
        until = self._options.expires_at
        if reason is FinishReason.EXPIRED and until is not None and time.time() >= until:
            return _UNFINISHED[Ending.EXPIRED]
        return f"request_{reason}", f"the request was {reason}"

    async def _give_up(self, code: str, message: str) -> None:
        """Cancels the requests in flight. Writes this error for each line without an answer."""
        # An earlier process may have enqueued these lines, too.
        until = time.monotonic() + _FILL_SECONDS
        while len(self._in_flight) < self._options.max_in_flight and time.monotonic() < until:
            if (item := await anext(self._lines, None)) is None:
                break
            self._in_flight[item.line.number] = item
        self._gateway.close()
        await self._collect()
        open_ones = self._in_flight.values()
        await self._cancel([(item, new) for item in open_ones for new in item.open_requests])
        await self._collect()
        for item in chain(self._in_flight.values(), self._held_back.values()):
            self._journal.add_error(item.line.number, item.line.custom_id, code, message)
        async for item in self._lines:
            assert item is not None  # no line waits for a worker here
            self._journal.add_error(item.line.number, item.line.custom_id, code, message)

    async def _cancel(self, requests: list[RequestOfLine]) -> None:
        """Cancels requests that are in the queue, and waits for their end."""
        left = await self._unfinished(requests)
        for item, new in left:
            await self._persist(partial(item.served.queue.cancel, new.request_id))
        until = time.monotonic() + _END_SECONDS
        while left and time.monotonic() < until:
            left = await self._unfinished(left)
            await asyncio.sleep(_FIRST_WAIT_SECONDS * 5)

    async def _unfinished(self, requests: list[RequestOfLine]) -> list[RequestOfLine]:
        states = await self._of_all(requests, _state_and_result)
        return [
            each
            for each, (state, _) in zip(requests, states, strict=True)
            if state is not None and not state.is_final
        ]

    async def _persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats `call` while the server refuses or is down. `call` must be safe to repeat.

        Gives up after `retry_seconds`. Raises errors about credentials and permissions at once.
        """
        until: float | None = None
        while True:
            try:
                return await call()
            except (AuthenticationError, NoPermissionError):
                raise
            except (redis.RedisError, RedisSideError) as error:
                until = until or time.monotonic() + self._options.retry_seconds
                if self._stopped.is_set():
                    raise _StoppedError from error
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_LONGEST_WAIT_SECONDS)


def _state_and_result(
    queue: AsyncRequestQueue, new: NewRequest
) -> Call[tuple[RequestState | None, Result | None]]:
    """Reads the state of a request (None if unknown), and the result of an ended request.

    If the record breaks the protocol, the state is `failed`.
    """

    def parse(reply: list[bytes | None]) -> tuple[RequestState | None, Result | None]:
        state = None if reply[0] is None else lookups.state_of(reply[0])
        is_over = state is not None and state.is_final
        return state, Result.model_validate_json(reply[1] or b"") if is_over else None

    key = queue.keys.request(new.request_id)
    reading = ["HMGET", key, "state", "result"]
    return Call("", reading, parse, lambda: (RequestState.FAILED, _SPOILT))


def _keys_of(item: LineRequest, new: NewRequest) -> list[str]:
    keys = item.served.queue.keys
    return [keys.request(new.request_id), *map(keys.picture, new.pictures)]


def _shorten(_: AsyncRequestQueue, key: str) -> Call[int]:
    return Call("", ["PEXPIRE", key, _KEPT_MS, "XX", "LT"], int)
