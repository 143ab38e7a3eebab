"""Tells once a second how a worker fares: its totals, its batch, and its part of the statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from promptq.shared.protocol.worker_stats import SlotState, SlotStats, WorkerStats
from promptq.shared.queue import scripts, statistics
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.engine.api.messages import EngineSnapshot, EngineStats, SequenceSnapshot
from promptq.worker.engine_thread import EngineThread
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.leases import Leases
from promptq.worker.telemetry.meter import Meter

INTERVAL_SECONDS = 1.0
_TTL_MS = 10_000
_PATIENCE_SECONDS = 0.1
"""A snapshot comes after the step that runs; one of a long step comes with the next heartbeat."""


class Heartbeat:
    """`stats` gives what the worker tells of itself besides its batch."""

    def __init__(
        self,
        queue: AsyncRequestQueue,
        engine: EngineThread,
        leases: Leases,
        meter: Meter,
        stats: Callable[[], WorkerStats],
    ) -> None:
        self.snapshot = EngineSnapshot()
        self.tokens_per_second = 0.0
        """Generated since the last beat."""
        self._queue = queue
        self._engine = engine
        self._leases = leases
        self._meter = meter
        self._stats = stats
        self._asked: asyncio.Task[EngineSnapshot] | None = None
        self._told: EngineStats = engine.stats
        self._told_at = time.monotonic()

    async def beat(self) -> int:
        """Tell; gives how many workers the queue has. Raises RedisError, OSError."""
        await self._look()
        part = self._part()
        num_workers = await self._queue.run(scripts.heartbeat(self._stats(), _TTL_MS, self.slots()))
        await self._queue.run(statistics.sample(part))
        return num_workers

    async def leave(self) -> None:
        """Tell that the worker is gone. Raises RedisError, OSError."""
        if self._asked is not None:
            self._asked.cancel()
        await self._queue.run(scripts.heartbeat(self._stats(), 0))

    def slots(self) -> list[SlotStats]:
        """The batch as it was last seen, without what has left it since."""
        found = []
        for sequence in self.snapshot.sequences:
            held = self._leases.by_sequence(sequence.sequence_id)
            if held is not None:
                found.append(_slot_of(held, sequence))
        return found

    async def _look(self) -> None:
        if self._asked is None:
            self._asked = asyncio.create_task(self._engine.snapshot())
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                self.snapshot = await asyncio.shield(self._asked)
                self._asked = None

    def _part(self) -> statistics.Contribution:
        """What was done since the last beat."""
        part, now, stats = self._meter.take_contribution(), time.monotonic(), self._engine.stats
        part.generated_tokens = stats.generation_tokens - self._told.generation_tokens
        part.prompt_tokens = stats.prompt_tokens - self._told.prompt_tokens
        seconds = now - self._told_at
        self.tokens_per_second = part.generated_tokens / seconds if seconds > 0 else 0.0
        self._told, self._told_at = stats, now
        return part


def _slot_of(held: Lease, sequence: SequenceSnapshot) -> SlotStats:
    timing = sequence.timing
    return SlotStats(
        slot=sequence.slot,
        request_id=held.request_id,
        tenant=held.request.tenant,
        priority=held.priority,
        attempt=held.claim.attempt,
        state=_state_of(held, sequence),
        prompt_tokens=held.num_prompt_tokens,
        emitted_tokens=sequence.num_tokens - held.num_prompt_tokens,
        max_tokens=held.engine_request.max_tokens,
        computed_tokens=sequence.num_computed_tokens,
        cached_tokens=timing.cached_tokens,
        recomputed_tokens=timing.recomputed_tokens,
        preemptions=timing.preemptions,
        kv_blocks=sequence.num_blocks,
        kv_shared_blocks=sequence.num_shared_blocks,
        claimed_at=held.claim.claimed_at_ms,
        prefill_at=_server_ms(held, timing.scheduled_at),
        first_token_at=_server_ms(held, timing.first_token_at),
        preempted_at=[*map(held.server_ms, timing.preempted_at)],
        resumed_at=[*map(held.server_ms, timing.resumed_at)],
    )


def _state_of(held: Lease, sequence: SequenceSnapshot) -> SlotState:
    if sequence.slot is None:
        return SlotState.PREEMPTED if sequence.timing.preemptions else SlotState.WAITING
    is_decoding = sequence.num_tokens - sequence.num_computed_tokens <= 1
    return SlotState.DECODE if is_decoding else SlotState.PREFILL


def _server_ms(held: Lease, at: float | None) -> int | None:
    return None if at is None else held.server_ms(at)
