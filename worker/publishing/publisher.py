"""Sends what the engine made: detokenise, one round trip for all of it, and act on the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from redis.exceptions import RedisError

from promptq.shared.protocol.events import ErrorInfo, TokenLogprob
from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.rows import Row, RowStatus
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.retry import keep_trying
from promptq.worker.engine.api.messages import SequenceOutput, StepOutput
from promptq.worker.engine_thread import EngineThread
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.leases import Leased, Leases, release
from promptq.worker.publishing.coalescer import Coalescer
from promptq.worker.telemetry.meter import Meter


class Publisher:
    """Drains the engine's outbox into Redis. While one step is sent, the engine computes the next.

    `on_progress` is called after each round trip, when there may be room for more; `on_finished`
    with each request that got its last event from this worker, `on_left` with each that left it and
    how: a finish reason, or what the server said. `coalescer` says what is sent at once. What the
    server does not take is tried again for `retry_seconds`; meanwhile the engine goes on until its
    outbox is full. `token_text` names the tokens of log-probabilities.
    """

    def __init__(
        self,
        queue: AsyncRequestQueue,
        leases: Leases,
        engine: EngineThread,
        on_progress: Callable[[], None],
        on_finished: Callable[[Lease], None],
        coalescer: Coalescer,
        retry_seconds: float = 0.0,
        meter: Meter | None = None,
        token_text: Callable[[int], str] | None = None,
        on_left: Callable[[Lease, str], None] = lambda held, outcome: None,
    ) -> None:
        self._queue = queue
        self._leases = leases
        self._engine = engine
        self._on_progress = on_progress
        self._on_finished = on_finished
        self._retry_seconds = retry_seconds
        self._meter = meter or Meter()
        self._token_text = token_text
        self._coalescer = coalescer
        self._on_left = on_left
        self._num_sending = 0
        self._with_gaps: list[Lease] = []
        self._without_memory: list[Lease] = []
        self._log = get_logger(worker_id=queue.worker_id)

    @property
    def is_sending(self) -> bool:
        """Whether rows, or requests that go back, are on their way."""
        return self._num_sending > 0

    async def run(self) -> None:
        """Until cancelled, or until the engine fails, whose exception it raises."""
        while True:
            rows = self._rows(await self._fetch())
            self._on_progress()  # slots are free before the round trip, not after
            if rows:
                await self.send(rows)
                self._on_progress()
            if self._without_memory:
                await self._give_back()
                self._on_progress()

    async def _fetch(self) -> list[StepOutput]:
        """The steps since the last call; none if what waits of earlier ones is to be sent first.

        Raises the engine's exception once it has failed and nothing waits any more.
        """
        try:
            async with asyncio.timeout(self._coalescer.seconds_left):
                return await self._engine.fetch()
        except Exception:  # the time is up, or the engine failed
            if self._coalescer.seconds_left is None:
                raise
            self._coalescer.hurry()
            return []

    async def flush(self) -> None:
        """At the end, send what waits: once, as it is generated again where that fails.

        Raises what the server said.
        """
        self._coalescer.hurry()
        self._retry_seconds = 0.0
        if rows := self._rows([]):
            await self.send(rows)

    async def send(self, rows: Sequence[Row]) -> None:
        """Publish rows and let go of the requests that they end or that were lost.

        Raises what the server said last when it took nothing for `retry_seconds`.
        """
        senders = [self._leases.by_request(row.request_id) for row in rows]
        untold = _untold(senders)
        lengths = [held.as_held() for held in untold]
        started = time.monotonic()
        self._num_sending += 1
        try:
            published = await keep_trying(
                lambda: self._queue.publish(rows, lengths), self._retry_seconds
            )
            statuses = [
                await self._fill_gap(row) if status is RowStatus.GAP else status
                for row, status in zip(rows, published.rows, strict=True)
            ]
        finally:
            self._num_sending -= 1
        self._meter.note_publish(len(rows), time.monotonic() - started)
        for row, sender, status in zip(rows, senders, statuses, strict=True):
            if status is RowStatus.OK and not row.finish_reason:
                continue
            if sender is not None and sender.claim.fence != row.fence:
                sender = None
            self._note_end(row.request_id, status, sender, row.finish_reason)
            held = self._leases.by_request(row.request_id)
            if held is None or held.claim.fence != row.fence:
                continue
            self._settle(held, status)
            if row.finish_reason and not status.is_lost:
                self._leases.drop(held)
                self._on_finished(held)
        for held, status in zip(untold, published.held, strict=True):
            self._note_end(held.request_id, status, held)
            if self._leases.by_request(held.request_id) is held:
                self._settle(held, status)
        await self._give_back_gaps()

    async def _give_back(self) -> None:
        """What the engine had no memory for, as a crash: who always asks too much comes to an end.

        Raises what the server said last when it took nothing for `retry_seconds`.
        """
        short, self._without_memory = self._without_memory, []
        self._num_sending += 1
        try:
            await keep_trying(
                lambda: release(self._queue, self._leases, short, crashed=True), self._retry_seconds
            )
        finally:
            self._num_sending -= 1
        for held in short:
            self._log.error("no memory for a request; it went back", request_id=held.request_id)
            self._on_left(held, "given_back")

    async def _give_back_gaps(self) -> None:
        """The server has lost writes: the next attempt goes on from what it still has."""
        lost, self._with_gaps = self._with_gaps, []
        if lost:
            with suppress(RedisError, OSError):  # else their leases run out
                await self._queue.release([held.as_held() for held in lost])

    async def _fill_gap(self, row: Row) -> RowStatus:
        """Send all that came before `row` once more, byte for byte, and the row.

        The log ends before it: the server lost writes, as a failover may do. What it still has
        answers `duplicate`.
        """
        held = self._leases.by_request(row.request_id)
        if held is None or held.claim.fence != row.fence:
            return RowStatus.GAP
        rows = held.rows_until(row)
        self._log.warning("the log lost events; sending them again", request_id=row.request_id)
        published = await keep_trying(lambda: self._queue.publish(rows), self._retry_seconds)
        return next((status for status in published.rows if status.is_lost), published.rows[-1])

    async def renew(self, held: Sequence[Leased]) -> None:
        """Renew leases; drop what the server says is cancelled, expired or not ours any more."""
        try:
            published = await self._queue.publish([], [item.as_held() for item in held])
        except (RedisError, OSError):
            for item in held:  # perhaps not told; to tell it twice does no harm
                if isinstance(item, Lease):
                    item.prompt_tokens_told = False
            raise
        for item, status in zip(held, published.held, strict=True):
            self._note_end(item.request_id, status, item)
            self._settle(item, status)
        self._on_progress()

    def abort(self, held: Lease) -> None:
        """Take a request out of the engine."""
        held.ended = True
        if held.in_engine:
            self._engine.abort(held.sequence_id)
            self._leases.mark_out_of_engine(held)

    def lose(self, held: Lease) -> None:
        """Let go of what another attempt has, be it one of this very worker."""
        self._settle(held, RowStatus.FENCED)

    def _note_end(
        self, request_id: str, status: RowStatus, held: Leased | None, reason: str = ""
    ) -> None:
        """Measure and log an end that a reply tells of, be it that of the row or by the server.

        Of two calls under way only one hears of it, perhaps when the request is let go of.
        """
        if status in (RowStatus.CANCELLED, RowStatus.EXPIRED):
            reason = status.value
        elif status.is_lost or not reason:
            return
        self._log.debug("ended", request_id=request_id, reason=reason)
        prepared = held if isinstance(held, Lease) else None
        self._meter.note_end(FinishReason(reason), prepared)
        if prepared is not None:
            self._on_left(prepared, reason)

    def _settle(self, held: Leased, status: RowStatus) -> None:
        if not status.is_lost or not self._leases.has(held):
            return
        if status in (RowStatus.GAP, RowStatus.ERROR):
            self._log.error("row refused", request_id=held.request_id, status=status)
        elif status is RowStatus.FENCED:
            self._log.warning("lease lost", request_id=held.request_id)
            self._meter.num_fences_lost += 1
        if isinstance(held, Lease):
            if status in (RowStatus.GAP, RowStatus.ERROR, RowStatus.FENCED):
                self._on_left(held, status.value)
            if status is RowStatus.GAP:
                self._with_gaps.append(held)
            self.abort(held)
        self._leases.drop(held)

    def _rows(self, steps: Iterable[StepOutput]) -> list[Row]:
        rows: list[Row | None] = []
        for step in steps:
            rows += map(self._row_or_failure, self._take(step))
        rows += map(self._row_or_failure, self._coalescer.take_due())  # where no step has come
        return [row for row in rows if row is not None]

    def _take(self, step: StepOutput) -> list[SequenceOutput]:
        """Measure a step and hand it to the coalescer; what is to be sent now."""
        ready: list[SequenceOutput] = []
        for output in step.outputs:
            held = self._leases.by_sequence(output.sequence_id)
            if held is None or held.ended:
                continue
            if output.timing is not None:
                held.timing = output.timing
            if output.token_ids:
                self._meter.note_output(held, step.ended_at)
            ready += self._coalescer.take(output, at_once=held.text.may_stop)
        self._meter.note_step(step)
        return ready + self._coalescer.take_due()

    def _row_or_failure(self, output: SequenceOutput) -> Row | None:
        """The row for an output; if making it fails, the row that ends this one request.

        None of the tokens that were to be sent with it is then sent.
        """
        held = self._leases.by_sequence(output.sequence_id)
        emitted = held.emitted if held is not None else None
        try:
            return self._row(output)
        except Exception as error:  # whatever it is, it is this request's alone
            if held is None or emitted is None:
                raise
            self._log.exception("a request's output failed", request_id=held.request_id)
            held.take_back(emitted)
            self.abort(held)
            reason = ErrorInfo(type="internal_error", message=f"its output failed: {error}")
            return held.next_row([], "", finish_reason=FinishReason.ERROR, error=reason)

    def _error_of(self, held: Lease, output: SequenceOutput) -> ErrorInfo:
        reason = output.error or "the engine failed it"
        if output.is_refused:
            field = held.request.field_that_bounds
            return ErrorInfo(type="unsupported", message=f"{field}: {reason}")
        self._log.error("the engine failed", request_id=held.request_id, error=output.error)
        return ErrorInfo(type="internal_error", message=reason)

    def _row(self, output: SequenceOutput) -> Row | None:
        held = self._leases.by_sequence(output.sequence_id)
        if held is None or held.ended:
            return None
        if output.given_back or output.finish_reason is not None:
            self._leases.mark_out_of_engine(held)
        if output.given_back:
            held.ended = True
            self._without_memory.append(held)
            return None
        if output.finish_reason is FinishReason.ERROR:
            error = self._error_of(held, output)
            return held.next_row(
                [], held.text.flush(), finish_reason=output.finish_reason, error=error
            )

        text, token_ids, reason, stream = "", [], output.finish_reason, held.text
        for token_id in output.token_ids:
            token_ids.append(token_id)
            is_last = reason is FinishReason.STOP and len(token_ids) == len(output.token_ids)
            if not (is_last and token_id in held.engine_request.end_token_ids):  # that is no text
                text += stream.push(token_id)
            if stream.stopped:
                break
        if reason is not None and not stream.stopped:
            text += stream.flush()
        if stream.stopped:
            reason = FinishReason.STOP
            self.abort(held)
        logprobs = output.logprobs[: len(token_ids)] if output.logprobs is not None else None
        if logprobs and self._token_text is not None:
            _name_tokens(logprobs, self._token_text)
        return held.next_row(token_ids, text, logprobs, reason)


def _name_tokens(logprobs: Sequence[TokenLogprob], token_text: Callable[[int], str]) -> None:
    for chosen in logprobs:
        chosen.token = token_text(chosen.token_id)
        for other in chosen.top or ():
            other.token = token_text(other.token_id)


def _untold(senders: Iterable[Lease | None]) -> list[Lease]:
    """Those whose exact prompt length is not in Redis yet."""
    found = [it for it in senders if it is not None and not it.prompt_tokens_told]
    return list(dict.fromkeys(found))
