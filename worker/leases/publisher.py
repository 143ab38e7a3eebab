"""Sends the engine's due outputs to Redis in one round trip, and acts on the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.rows import Row, RowStatus
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.tasks import heeding_cancels
from promptq.shared.server.retry import keep_trying
from promptq.worker.engine.api.messages import GivenBack, SequenceOutput, StepOutput
from promptq.worker.engine.api.port import EnginePort
from promptq.worker.leases.coalescer import Coalescer
from promptq.worker.leases.exchange import Exchange
from promptq.worker.leases.held_and_lost_leases import Leases
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.meter import Meter
from promptq.worker.leases.rows import RowBuilder
from promptq.worker.text.tokenizer import Tokenizer

_Sent = tuple[Lease, Row]


class Publisher:
    """Sends the outputs of a step to Redis while the engine computes the next step.

    The coalescer decides which tokens wait for later tokens, to share an event with them. If Redis
    does not accept rows, the publisher sends them again for up to `retry_seconds`. Meanwhile the
    engine continues until its outbox (the queue of its outputs) is full.
    """

    def __init__(
        self,
        queue: AsyncRequestQueue,
        leases: Leases,
        engine: EnginePort,
        tokenizer: Tokenizer,
        coalescer: Coalescer,
        meter: Meter,
        exchange: Exchange,
        retry_seconds: float = 0.0,
    ) -> None:
        self._queue = queue
        self._leases = leases
        self._engine = engine
        self._rows = RowBuilder(tokenizer)
        self._coalescer = coalescer
        self._meter = meter
        self._exchange = exchange
        self._retry_seconds = retry_seconds
        self._log = get_logger(worker_id=queue.worker_id)

    async def run(self) -> None:
        """Publish outputs until this task is cancelled. Raises the engine's exception if the engine
        fails, and RedisError or OSError if the server accepts nothing for `retry_seconds`."""
        while True:
            steps = await self._fetch()
            # Under load this task is nearly always in this call, where redis-py may lose a cancel.
            await heeding_cancels(self._publish(steps))

    async def flush(self) -> None:
        """Send the outputs that the coalescer still delays. Call this when the worker ends.

        Does not retry: another worker will generate these tokens again. Raises RedisError, OSError.
        """
        self._coalescer.hurry()
        self._retry_seconds = 0.0
        await self._publish([])

    async def refuse(self, lease: Lease, error: InvalidRequestError) -> None:
        """End a request that cannot be prepared. Raises RedisError or OSError as `run` does."""
        self._leases.ending(lease)
        await self._send([(lease, self._rows.refusal(lease.claim, error))])

    async def complete(self, lease: Lease) -> None:
        """End a request that is complete already. Raises RedisError or OSError as `run` does."""
        await self._send([(lease, self._rows.completion(lease.prepared))])

    async def _fetch(self) -> list[StepOutput]:
        """Waits for steps of the engine, and returns them; an empty list if delayed outputs become
        due first. Raises a failed engine's exception once no delayed outputs are left."""
        try:
            async with asyncio.timeout(self._coalescer.seconds_left):
                return await self._engine.fetch()
        except Exception:  # the time is over, or the engine has failed
            if self._coalescer.seconds_left is None:
                raise
            self._coalescer.hurry()
            return []

    async def _publish(self, steps: Sequence[StepOutput]) -> None:
        # Requests that the engine gave back are released after the rows.
        rows: list[_Sent] = []
        given_back: list[tuple[Lease, GivenBack]] = []
        for output in self._due(steps):
            lease = self._leases.by_sequence(output.sequence_id)
            if lease is None:
                continue
            if output.given_back is not None:
                self._leases.ending(lease, by_engine=True)
                given_back.append((lease, output.given_back))
            else:
                row = self._rows.row(lease.prepared, output)
                if row.finish_reason:
                    self._leases.ending(lease, by_engine=output.finish_reason is not None)
                rows.append((lease, row))
        self._leases.feed()  # before the round trip, so that free slots do not wait for it
        if rows:
            await self._send(rows)
            self._leases.feed()
        for lease, why in given_back:
            note = self._log.error if why.is_blamed else self._log.info
            note(f"a request goes back to the queue: {why.reason}", request_id=lease.request_id)
            self._leases.returning(lease, crashed=why.is_blamed, delay_ms=why.delay_ms)

    def _due(self, steps: Iterable[StepOutput]) -> Iterator[SequenceOutput]:
        """Yields the outputs that the coalescer lets pass. If the caller ends a sequence between
        two outputs, the sequence's later outputs are left out."""
        for step in steps:
            for output in step.outputs:
                lease = self._leases.by_sequence(output.sequence_id)
                if lease is None:
                    continue
                prepared = lease.prepared
                if output.timing is not None:
                    prepared.timing = output.timing
                if output.token_ids:
                    self._meter.note_output(prepared, step.ended_at)
                yield from self._coalescer.take(output, at_once=prepared.text.may_stop)
            self._meter.note_step(step)
            yield from self._coalescer.take_due()
        yield from self._coalescer.take_due()  # also if there was no step

    async def _send(self, rows: Sequence[_Sent]) -> None:
        """Sends rows, and acts on Redis's answers. After `retry_seconds` without success, raises
        the last RedisError or OSError."""
        rows = [(lease, each) for lease, row in rows for each in lease.with_unsent(row)]
        unreported = list(dict.fromkeys(lease for lease, _ in rows if lease.has_unreported_length))
        lengths = [lease.as_held() for lease in unreported]
        started = time.monotonic()
        published = await keep_trying(
            lambda: self._queue.publish([row for _, row in rows], lengths), self._retry_seconds
        )
        statuses = [
            await self._fill_gap(lease, row) if status is RowStatus.GAP else status
            for (lease, row), status in zip(rows, published.rows, strict=True)
        ]
        self._meter.note_publish(len(rows), time.monotonic() - started)
        for (lease, row), status in zip(rows, statuses, strict=True):
            if status is RowStatus.OK and not row.finish_reason:
                continue
            if status in (RowStatus.GAP, RowStatus.ERROR) and lease.is_held:
                self._log.error(
                    "the server refused a row", request_id=row.request_id, status=status
                )
            self._exchange.take_answer(lease, status, row.finish_reason)
        self._exchange.take_answers(unreported, lengths, published.held)

    async def _fill_gap(self, lease: Lease, row: Row) -> RowStatus:
        """Sends all rows of the request again, up to and including `row`. Returns the first status
        that reports a lost lease. If no status does, returns the status of `row`.

        Rows are missing in the request's log if Redis lost writes, for example in a failover. Redis
        answers `duplicate` for rows that are not missing.
        """
        if not lease.is_held or lease.prepared_or_none is None:
            return RowStatus.GAP
        rows = lease.prepared.rows_until(row)
        self._log.warning("the log lost events; sending them again", request_id=row.request_id)
        published = await keep_trying(lambda: self._queue.publish(rows), self._retry_seconds)
        return next((status for status in published.rows if status.is_lost), published.rows[-1])
