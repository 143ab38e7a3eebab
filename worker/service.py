"""A worker's lifetime: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from promptq.shared.errors import InvalidRequestError, PromptqError
from promptq.shared.protocol.claims import Claim, Room
from promptq.shared.protocol.events import ErrorInfo, Result, TokenEvent, Usage
from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.rows import Row
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.settings import Settings
from promptq.shared.runtime.tasks import end
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.server.retry import keep_trying
from promptq.worker.control_channel import listen
from promptq.worker.engine_thread import EngineThread
from promptq.worker.intake.prefetcher import Prefetcher
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.leases import Leased, Leases, keep_alive, release
from promptq.worker.leases.preparation import Preparation
from promptq.worker.liveness.heartbeat import INTERVAL_SECONDS, Heartbeat
from promptq.worker.liveness.reaper import Reaper
from promptq.worker.publishing.cancellation import Cancellation
from promptq.worker.publishing.coalescer import Coalescer, default_rate
from promptq.worker.publishing.publisher import Publisher
from promptq.worker.served_model import Served
from promptq.worker.telemetry.meter import Meter
from promptq.worker.telemetry.tracing import RequestTracer

_REAPS_PER_LEASE = 4
_WATCHES_PER_STANDSTILL = 8
_MAX_WATCH_SECONDS = 1.0


class EngineStuckError(PromptqError):
    """The engine, or the preparation of a request, has made no progress for so long that the
    worker gives everything back and ends."""


class Worker:
    """Serves one queue with one engine until it is told to stop.

    `start_up_seconds` is what each stage of loading took, to be told in the heartbeat. The parts
    and what they do: intake claims and prepares, the feeder below hands to the engine,
    the publisher sends what comes out, cancels and leases watch over what is held.
    """

    def __init__(
        self,
        settings: Settings,
        served: Served,
        client: redis.asyncio.Redis,
        start_up_seconds: Mapping[str, float] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        self.served = served
        self._settings = settings
        self._client = client
        self._queue = AsyncRequestQueue(
            client,
            settings.queue,
            worker_id=self.worker_id,
            lease_ms=settings.lease_ms,
            max_crashes=settings.max_crashes,
            model=served.identity,
            seed=settings.seed,
        )
        self.leases = Leases()
        self.engine = EngineThread(served.engine)
        self.meter = Meter()
        self._tracer = RequestTracer(tracing, settings.queue, served.identity.name, self.worker_id)
        self._heartbeat = Heartbeat(self._queue, self.engine, self.leases, self.meter, self.stats)
        self._limits = self.engine.limits
        # Waiting inside the engine already, so that a freed slot is filled by the very next step.
        self._lookahead = max(1, self._limits.max_num_seqs // 8)
        self._publisher = Publisher(
            self._queue,
            self.leases,
            self.engine,
            self._feed,
            self._count_finished,
            Coalescer(settings.max_events_per_second or default_rate()),
            settings.redis_retry_seconds,
            self.meter,
            served.tokenizer.token_text,
            self._tracer.end,
        )
        self._cancels = Cancellation(self._queue, self.leases, self._publisher)
        self._reaper = Reaper(self._queue)
        self.intake = Prefetcher(
            self._queue,
            self.leases,
            Preparation(
                served.tokenizer,
                self._limits,
                served.identity,
                served.end_token_ids,
                served.grammars,
            ),
            room=self._room,
            renew=self._publisher.renew,
            on_ready=self._feed,
            on_lost=self._publisher.lose,
            on_invalid=self._fail_claim,
            on_complete=self._complete,
            depth=settings.prefetch_depth,
            stuck_seconds=settings.stuck_seconds,
            claim_time=self.meter.claim_time,
        )
        self._start_up = dict(start_up_seconds or {})
        self._draining = False
        self._told_to_drain = asyncio.Event()
        self._started_at_ms = int(time.time() * 1000)
        self._num_finished = 0
        self._sums = {"queue_ms": 0.0, "prompt_ms": 0.0, "generation_ms": 0.0}
        self._tasks: list[asyncio.Task[None]] = []
        self._log = get_logger(worker_id=self.worker_id, queue=settings.queue)

    async def start(self) -> None:
        """Begin to claim. Raises ModelMismatchError if the queue belongs to another model."""
        await self._queue.take_batch(Room(max_count=0, token_budget=0))
        self.engine.start()
        lease_ms = self._queue.lease_ms
        self._spawn(self._publisher.run())
        self._spawn(self._watch_engine())
        self._spawn(self._listen())
        self._spawn(self._every(0.0, self._cancels.run_once))
        self._spawn(keep_alive(self.leases, lease_ms, self._renew_when_possible, self._is_stuck))
        self._spawn(self._every(INTERVAL_SECONDS, self._beat))
        self._spawn(self._every(lease_ms / 1000 / _REAPS_PER_LEASE, self._reaper.run_once))
        await self._beat()
        await self._survive_redis(self._compare_lengths)
        self.intake.start()

    async def serve(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, or until the queue's control channel says to drain.

        Raises what made a part of the worker fail.
        """
        stopping = {asyncio.create_task(it.wait()) for it in (stop, self._told_to_drain)}
        parts = [*self._tasks, self.intake.task]
        try:
            done, _ = await asyncio.wait([*stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
            for task in done - stopping:
                task.result()
        finally:
            for task in stopping:
                task.cancel()

    async def drain(self, now: asyncio.Event) -> None:
        """Claim no more; finish what runs within the grace time, or until `now` is set.

        Raises what made a part of the worker fail, as `serve` does.
        """
        self._draining = True
        await self._survive_redis(self.intake.stop)
        deadline = time.monotonic() + self._settings.drain_seconds
        while self._is_busy and not now.is_set() and time.monotonic() < deadline:
            for task in self._tasks:
                if task.done():
                    task.result()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await now.wait()

    async def stop(self) -> None:
        """End all parts, give back what is still held with its progress, and leave the queue."""
        self._draining = True
        await self._survive_redis(self.intake.stop)
        await end(self._tasks)
        await self._survive_redis(self._publisher.flush)
        broken = self.engine.has_failed or self._engine_hangs()
        suspects: list[Leased] = [held for held in self.leases if held.in_engine and broken]
        for held in self.leases:
            self._publisher.abort(held)
        await self._survive_redis(lambda: self._give_back(suspects))
        await self.engine.stop(patience=self._settings.stuck_seconds)
        if self.served.grammars is not None and not self.intake.is_preparing:
            await asyncio.to_thread(self.served.grammars.close)
        await self._survive_redis(self._heartbeat.leave)

    @property
    def _is_busy(self) -> bool:
        """Whether anything runs, or ran and is not told of yet."""
        return self.leases.num_in_engine > 0 or self._publisher.is_sending

    def stats(self) -> WorkerStats:
        """What the worker tells of itself."""
        engine, limits = self.engine.stats, self._limits
        finished = max(1, self._num_finished)
        return WorkerStats(
            worker_id=self.worker_id,
            model=self.served.identity.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            state="draining" if self._draining else "running",
            started_at_ms=self._started_at_ms,
            device=self.served.device,
            dtype=self.served.dtype,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_prefetched=self.intake.available,
            mean_prefetched=self.intake.metrics.mean_available,
            mean_prefetch_wait_ms=self.intake.metrics.mean_wait_seconds * 1000,
            num_prefetch_empty=self.intake.metrics.num_empty,
            num_processed=engine.num_processed,
            prompt_tokens=engine.prompt_tokens,
            cached_tokens=engine.cached_tokens,
            generation_tokens=engine.generation_tokens,
            recomputed_tokens=engine.recomputed_tokens,
            drafted_tokens=engine.drafted_tokens,
            accepted_tokens=engine.accepted_tokens,
            num_preemptions=engine.num_preemptions,
            kv_tokens=limits.kv_tokens,
            kv_used_tokens=engine.num_used_blocks * limits.block_size,
            kv_bytes_per_token=limits.bytes_per_token,
            kv_blocks=engine.num_blocks,
            kv_used_blocks=engine.num_used_blocks,
            kv_shared_blocks=self._heartbeat.snapshot.num_shared_blocks,
            kv_free_blocks=engine.num_blocks - engine.num_used_blocks,
            kv_cached_blocks=engine.num_cached_blocks,
            step_ms=self._heartbeat.snapshot.step_seconds * 1000,
            current_step_ms=int(self.engine.seconds_without_progress() * 1000),
            tokens_per_second=engine.generation_tokens / max(engine.busy_seconds, 1e-9),
            recent_tokens_per_second=self._heartbeat.tokens_per_second,
            mean_queue_ms=self._sums["queue_ms"] / finished,
            mean_prompt_ms=self._sums["prompt_ms"] / finished,
            mean_generation_ms=self._sums["generation_ms"] / finished,
            peak_memory_bytes=engine.peak_memory_bytes,
            start_up_seconds=sum(self._start_up.values()),
            start_up_stages=" ".join(
                f"{stage.replace(' ', '_')}={seconds:.3f}"
                for stage, seconds in self._start_up.items()
            ),
        )

    def _room(self, depth: int) -> Room:
        """What can be claimed: slots and KV that nothing held is counted with.

        A prefix that sequences share is counted once, and no request needs more than the model's
        length, however large its payload. Both are negative while urgent requests are
        held that will preempt; the more of them, the less there is to preempt for further ones.
        """
        capacity = self._limits.kv_tokens
        if self.leases.has_suspect:
            return Room(max_count=0, token_budget=0, num_held=len(self.leases))
        saved = self.engine.stats.num_saved_blocks * self._limits.block_size
        wanted = self._limits.max_num_seqs + self._lookahead + depth - self.leases.num_counted
        return Room(
            max_count=wanted,
            token_budget=capacity - self.leases.kv_need + saved,
            capacity=self._limits.max_model_len,
            preemptible=self.leases.preemptible,
            num_held=len(self.leases) + self.engine.num_aborting,
        )

    def _feed(self) -> None:
        """Hand prepared requests to the engine: as many as it can use, and any more urgent one."""
        most = self._limits.max_num_seqs + self._lookahead
        while self.leases.num_in_engine < most or self._next_is_more_urgent():
            held = self.intake.next_or_none()
            if held is None:
                break
            self.leases.mark_in_engine(held)
            self.engine.add(held.engine_request)
        self.intake.room_freed()

    def _next_is_more_urgent(self) -> bool:
        held = self.intake.peek()
        return held is not None and self.leases.has_less_urgent_in_engine(held.priority)

    async def _fail_claim(self, claim: Claim, error: InvalidRequestError) -> None:
        """End a request that never became a sequence."""
        index = claim.num_logged
        event = TokenEvent(
            index=index,
            token_ids=[],
            text="",
            finish_reason=FinishReason.ERROR,
            attempt=claim.attempt,
            usage=Usage(completion_tokens=index),
            error=ErrorInfo(type=error.error_type, message=str(error), code=error.code),
        )
        result = Result.fold([*claim.events, event]).to_json()
        self._log.debug("refused", request_id=claim.request_id, error=str(error))
        await self._publisher.send([Row.of(claim.request_id, claim.fence, event, result)])

    async def _complete(self, held: Lease) -> None:
        """End a request whose earlier attempts emitted all it may have."""
        reason = FinishReason.STOP if held.is_stopped else FinishReason.LENGTH
        await self._publisher.send([held.next_row([], held.text.flush(), finish_reason=reason)])

    def _count_finished(self, held: Lease) -> None:
        if held.stats is not None:
            self._num_finished += 1
            for name in self._sums:
                self._sums[name] += getattr(held.stats, name)

    async def _beat(self) -> None:
        self.intake.num_workers = await self._heartbeat.beat()

    async def _compare_lengths(self) -> None:
        """Warn of the first worker of the queue with another limit: streams may move to it."""
        keys, own = self._queue.keys, self._limits.max_model_len
        with suppress(ValueError):  # whatever a stranger wrote there, a worker starts
            for worker_id in await self._queue.run(lookups.live_worker_ids(keys, 0)):
                other = await self._queue.run(lookups.worker_stats(keys, worker_id))
                if other is not None and other.max_model_len not in (0, own):
                    self._log.warning(
                        "another worker of the queue takes other lengths; streams that move between"
                        " them may be cut short: give all the same --max-model-len",
                        max_model_len=own,
                        other_max_model_len=other.max_model_len,
                        other_worker_id=worker_id,
                    )
                    return

    async def _listen(self) -> None:
        def drain(worker_id: str | None) -> None:
            if worker_id in (None, self.worker_id):
                self._log.info("told to drain")
                self._told_to_drain.set()

        await listen(
            self._client, self._queue.keys, self.intake.wake, self._cancels.add, on_drain=drain
        )

    async def _give_back(self, suspects: list[Leased]) -> None:
        """Before the step that runs has ended: others may go on at once, for it writes nothing.

        One of the suspects made the engine fail, which counts against each of them.
        """
        to_blame = self.intake.to_blame  # where the intake itself could not give it back
        suspects = [*suspects, to_blame] if to_blame is not None else suspects
        others = [held for held in (*self.leases, *self.leases.claims) if held not in suspects]
        seconds = self._queue.lease_ms / 1000  # later there is nothing to give back
        for held in self.leases:
            self._tracer.end(held, "error" if held in suspects else "given_back")
        await keep_trying(
            lambda: release(self._queue, self.leases, suspects, crashed=True), seconds
        )
        await keep_trying(lambda: release(self._queue, self.leases, others), seconds)

    async def _renew_when_possible(self, held: list[Leased]) -> None:
        try:
            await self._publisher.renew(held)
        except (RedisError, OSError) as error:
            self._log.warning("leases not renewed", error=str(error))

    def _engine_hangs(self) -> bool:
        return self.engine.seconds_without_progress() > self._settings.stuck_seconds

    def _is_stuck(self) -> bool:
        return self._engine_hangs() or self.intake.hangs_on is not None

    async def _watch_engine(self) -> None:
        seconds = self._settings.stuck_seconds
        while True:
            await asyncio.sleep(min(seconds / _WATCHES_PER_STANDSTILL, _MAX_WATCH_SECONDS))
            if (claim := self.intake.hangs_on) is not None:
                what, of = "the preparation of a request", {"request_id": claim.request_id}
            elif self._engine_hangs():
                what, of = "the engine", {}
            else:
                continue
            held = len(self.leases)
            self._log.error(f"{what} hangs; giving everything back", held=held, **of)
            raise EngineStuckError(f"{what} has made no progress for {seconds:g} s")

    async def _every(self, seconds: float, action: Any) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._survive_redis(action)

    async def _survive_redis(self, action: Any) -> None:
        try:
            await action()
        except (RedisError, OSError) as error:
            self._log.warning("Redis does not answer", error=str(error))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))
