"""Publishes a worker's statistics and batch once a second, and adds the work of that second to the
queue's statistics."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import fields

from promptq.shared.protocol.claims import AFFINITY_RESULTS
from promptq.shared.protocol.worker_stats import RECORD_MS, SAMPLE_MS, WorkerStats
from promptq.shared.queue import lookups, scripts, statistics
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.engine.api.messages import EngineSnapshot, EngineStats
from promptq.worker.engine.api.port import EnginePort
from promptq.worker.health.live_batch import live_batch
from promptq.worker.leases.held_and_lost_leases import Leases
from promptq.worker.leases.meter import Meter

INTERVAL_SECONDS = 1.0
_ENGINE_FIELDS = {each.name for each in fields(EngineStats)} & WorkerStats.model_fields.keys()
_FULL_REPORT_SECONDS = 5.0
"""Between two reports with all statistics. The others have only what changed."""
_PATIENCE_SECONDS = 0.1
"""The most seconds to wait for the engine's snapshot of the batch. The engine takes the snapshot
after the running step. If the step takes longer, a later heartbeat publishes the snapshot."""


class Heartbeat:
    """Publishes heartbeats of a worker. `about` has values that seldom change, such as names."""

    def __init__(
        self,
        queue: AsyncRequestQueue,
        engine: EnginePort,
        leases: Leases,
        meter: Meter,
        about: WorkerStats,
    ) -> None:
        self.about = about
        self._snapshot = EngineSnapshot()
        self._tokens_per_second = 0.0  # generated since the last beat
        self._queue = queue
        self._engine = engine
        self._leases = leases
        self._meter = meter
        self._next_snapshot: asyncio.Task[EngineSnapshot] | None = None
        self._reported: EngineStats = engine.stats  # of the last heartbeat
        self._reported_at = time.monotonic()
        self._last_sent: WorkerStats | None = None  # None: send all statistics
        self._full_report_at = -math.inf
        self._next_sample_at = -math.inf

    async def beat(self) -> int:
        """Publish a heartbeat, and add the work since the last one to the queue's statistics.

        Returns the number of the queue's live workers. Raises RedisError, OSError.
        """
        await self._take_snapshot()
        contribution = self._contribution()
        num_workers = await self._report()
        if contribution or await self._is_sample_due():
            await self._queue.run(statistics.sample(contribution))
        return num_workers

    async def _is_sample_due(self) -> bool:
        """Returns whether no worker has begun the current sample. The first call of each sample
        counts what waits, so idle workers begin samples, too."""
        if time.monotonic() < self._next_sample_at:
            return False
        open_bucket = statistics.open_bucket(self._queue.keys)
        now_ms, bucket = await self._queue.run([lookups.server_time_ms(), open_bucket])
        since_begin_ms = now_ms % SAMPLE_MS
        self._next_sample_at = time.monotonic() + (SAMPLE_MS - since_begin_ms) / 1000
        return bucket != now_ms - since_begin_ms

    async def _report(self) -> int:
        """Publish the statistics, or what changed in them. Returns the number of workers."""
        now, stats = time.monotonic(), self.stats()
        is_full = now - self._full_report_at > _FULL_REPORT_SECONDS
        last, self._last_sent = None if is_full else self._last_sent, None
        batch = live_batch(self._snapshot, self._leases)
        num_workers = await self._queue.run(scripts.heartbeat(stats, RECORD_MS, batch, last))
        if num_workers < 0:
            return await self._report()
        if last is None:
            self._full_report_at = now
        self._last_sent = stats
        return num_workers

    async def leave(self) -> None:
        """Report that the worker leaves the queue. Raises RedisError, OSError."""
        if self._next_snapshot is not None:
            self._next_snapshot.cancel()
        await self._queue.run(scripts.heartbeat(self.stats(), 0))

    def stats(self) -> WorkerStats:
        """Returns the current statistics of the worker, without its batch."""
        engine, limits, meter = self._engine.stats, self._engine.limits, self._meter
        ready = self._leases.ready
        now = {
            **{name: getattr(engine, name) for name in _ENGINE_FIELDS},
            "num_prefetched": len(ready),
            "mean_prefetched": ready.mean_length,
            "mean_prefetch_wait_ms": ready.mean_wait_seconds * 1000,
            "num_prefetch_empty": ready.num_empty,
            "kv_used_tokens": engine.num_used_blocks * limits.block_size,
            "kv_blocks": engine.num_blocks,
            "kv_used_blocks": engine.num_used_blocks,
            "kv_shared_blocks": self._snapshot.num_shared_blocks,
            "kv_free_blocks": engine.num_blocks - engine.num_used_blocks,
            "kv_cached_blocks": engine.num_cached_blocks,
            "step_ms": self._snapshot.step_seconds * 1000,
            "peak_memory_bytes": self._snapshot.peak_memory_bytes,
            "current_step_ms": int(self._engine.seconds_without_progress() * 1000),
            "tokens_per_second": engine.generation_tokens / max(engine.busy_seconds, 1e-9),
            "recent_tokens_per_second": self._tokens_per_second,
            "mean_queue_ms": meter.mean_ms("queue_ms"),
            "mean_prompt_ms": meter.mean_ms("prompt_ms"),
            "mean_generation_ms": meter.mean_ms("generation_ms"),
            **{f"affinity_{each}": meter.num_by_affinity[each] for each in AFFINITY_RESULTS},
            "affinity_cached_tokens": meter.affinity_cached_tokens,
            "refused": " ".join(self._engine.abilities.refused),
        }
        if not self._engine.is_accepting and self.about.state == "running":
            now["state"] = "no_server"
        return self.about.model_copy(update=now)

    async def _take_snapshot(self) -> None:
        if self._next_snapshot is None:
            self._next_snapshot = asyncio.create_task(self._engine.snapshot())
        done, _ = await asyncio.wait((self._next_snapshot,), timeout=_PATIENCE_SECONDS)
        if done:
            self._snapshot, self._next_snapshot = self._next_snapshot.result(), None

    def _contribution(self) -> statistics.Contribution:
        work, now, stats = self._meter.take_contribution(), time.monotonic(), self._engine.stats
        work.generated_tokens = stats.generation_tokens - self._reported.generation_tokens
        work.prompt_tokens = stats.prompt_tokens - self._reported.prompt_tokens
        seconds = now - self._reported_at
        self._tokens_per_second = work.generated_tokens / seconds if seconds > 0 else 0.0
        self._reported, self._reported_at = stats, now
        if self.about.overflow:
            work.overflow_tokens, work.generated_tokens = work.generated_tokens, 0
        return work
