"""A worker's lifetime: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import redis.asyncio
from redis.exceptions import NoPermissionError, RedisError

from promptq.shared.errors import SpoiltRecordError
from promptq.shared.protocol.claims import Room
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups
from promptq.shared.queue.maxmemory_policy import LOOK_SECONDS, MaxmemoryLog, maxmemory_warning
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.queue.spoilt import note
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.tasks import end
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.server.cluster import try_once
from promptq.shared.server.retry import keep_trying, note_failure
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.api.port import EnginePort
from promptq.worker.health.heartbeat import INTERVAL_SECONDS, Heartbeat
from promptq.worker.health.probes import Health
from promptq.worker.health.reaper import REAPS_PER_LEASE, Reaper
from promptq.worker.health.systemd import notify, watchdog_seconds
from promptq.worker.health.watchdogs import EngineWatchdog, renew_leases
from promptq.worker.leases.coalescer import Coalescer, default_rate
from promptq.worker.leases.exchange import Exchange
from promptq.worker.leases.exit_log import ExitLog
from promptq.worker.leases.held_and_lost_leases import Exit, Leases
from promptq.worker.leases.lease import LeaseState
from promptq.worker.leases.meter import Meter
from promptq.worker.leases.prefetcher import Prefetcher
from promptq.worker.leases.prepare_or_resume import Preparation
from promptq.worker.leases.publisher import Publisher
from promptq.worker.leases.token_budget import ClaimPolicy
from promptq.worker.serve import control_channel
from promptq.worker.serve.build import Served
from promptq.worker.serve.engine_thread import EngineThread

_NOTE_SECONDS = 5.0


class Worker:
    """Serves one queue with one engine until it is stopped.

    The worker creates its parts and runs them. The prefetcher (`intake`) claims and prepares
    requests. `Leases` hands the requests to the engine, and the publisher sends the engine's
    outputs. All parts report to `Leases` what happens to a request. `start_up_seconds` has the
    seconds of each stage of loading, for the heartbeat.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        served: Served,
        client: redis.asyncio.Redis,
        start_up_seconds: Mapping[str, float] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        self.served = served
        self._settings = settings
        self._queue = AsyncRequestQueue(
            client,
            settings.queue,
            worker_id=self.worker_id,
            lease_ms=settings.lease_ms,
            max_crashes=settings.max_crashes,
            model=served.identity,
            seed=settings.seed,
            is_overflow=settings.overflow,
        )
        engine = served.engine
        self.engine = engine if isinstance(engine, EnginePort) else EngineThread(engine)
        self.leases = Leases(self.engine)
        self.meter = Meter()
        self._exit_log = ExitLog(
            self.meter, tracing, settings.queue, served.identity.name, self.worker_id
        )
        about = self._about(start_up_seconds or {})
        self.heartbeat = Heartbeat(self._queue, self.engine, self.leases, self.meter, about)
        self._exchange = Exchange(self._queue, self.leases, self._exit_log)
        self._publisher = Publisher(
            self._queue,
            self.leases,
            self.engine,
            served.tokenizer,
            Coalescer(settings.max_events_per_second or default_rate()),
            self.meter,
            self._exchange,
            settings.redis_retry_seconds,
        )
        self._reaper = Reaper(self._queue)
        self.intake = Prefetcher(
            self._queue,
            self.leases,
            Preparation(
                served.tokenizer,
                self.engine,
                # Requests name the queue's model, which an overflow worker may not have.
                replace(served.identity, name="" if settings.overflow else served.identity.name),
                served.end_token_ids,
                served.grammars,
                served.pooling,
            ),
            ClaimPolicy(
                self.leases,
                self.engine,
                settings.prefetch_depth,
                is_overflow=settings.overflow,
            ),
            self._publisher,
            self._exchange,
            self.meter,
            settings.stuck_seconds,
        )
        self._watchdog = EngineWatchdog(self.engine, self.intake, settings.stuck_seconds)
        self._maxmemory_log = MaxmemoryLog()
        self._drain_requested = asyncio.Event()
        self._has_started = False
        self._was_refused = False
        self._tasks: list[asyncio.Task[None]] = []
        self._log = get_logger(worker_id=self.worker_id, queue=settings.queue)

    def _about(self, start_up_seconds: Mapping[str, float]) -> WorkerStats:
        served, limits = self.served, self.engine.limits
        return WorkerStats(
            worker_id=self.worker_id,
            model=served.identity.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            state="running",
            overflow=self._settings.overflow,
            started_at_ms=int(time.time() * 1000),
            device=served.device,
            dtype=served.dtype,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            kv_tokens=limits.kv_tokens,
            kv_bytes_per_token=limits.bytes_per_token,
            state_bytes=limits.state_bytes,
            untold=" ".join(sorted(self.engine.abilities.unreported)),
            start_up_seconds=sum(start_up_seconds.values()),
            start_up_stages=" ".join(
                f"{stage.replace(' ', '_')}={took:.3f}" for stage, took in start_up_seconds.items()
            ),
        )

    async def start(self) -> None:
        """Start all parts, and then claim requests. Retries for `redis_wait` seconds.

        Raises ModelMismatchError if the queue has another model. Raises RedisError, OSError.
        """
        no_room = Room(max_count=0, token_budget=0)
        await keep_trying(lambda: self._queue.take_batch(no_room), self._settings.redis_wait)
        messages = control_channel.listen(self._queue)
        await anext(messages)  # raises if the user may not listen
        self.engine.start()
        lease_ms = self._queue.lease_ms
        self._spawn(self._publisher.run())
        self._spawn(self._exchange.run_returns())
        self._spawn(self._watchdog.watch())
        listening = self._queue, self.leases.wake_up, self._exchange, self._drain_requested
        self._spawn(control_channel.act(messages, *listening))
        self._spawn(self._exchange.run_cancels())
        self._spawn(renew_leases(self.leases, self._exchange, self._watchdog, lease_ms))
        self._spawn(self._every(lease_ms / 1000 / REAPS_PER_LEASE, self._reaper.run_once))
        self._spawn(self._every(_NOTE_SECONDS, self._note_queue))
        self._spawn(self._every(LOOK_SECONDS, self._look_at_maxmemory_policy))
        if (seconds := watchdog_seconds()) is not None:
            self._spawn(self._every(seconds, self._notify_service_manager))
        await keep_trying(self._beat, self._settings.redis_wait)  # reports a wrong role now
        self._spawn(self._every(INTERVAL_SECONDS, self._beat))  # only now: one beat at a time
        await self._survive_redis(self._compare_lengths)
        await self._survive_redis(self._note_queue)
        await self._survive_redis(self._look_at_maxmemory_policy)
        self.intake.start()
        self._has_started = True

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve requests until `stop` is set, or until a message orders a drain.

        Raises the exception of a part that fails.
        """
        stopping = {asyncio.create_task(event.wait()) for event in (stop, self._drain_requested)}
        parts = [*self._tasks, self.intake.task]
        try:
            done, _ = await asyncio.wait([*stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
            for task in done - stopping:
                task.result()
        finally:
            for task in stopping:
                task.cancel()

    async def drain(self, now: asyncio.Event) -> None:
        """Stop claiming, and let running requests finish until the grace time is over.

        If `now` is set, the grace time ends early. Raises the errors of `serve`.
        """
        self.heartbeat.about.state = "draining"
        notify("STOPPING=1")
        deadline = time.monotonic() + self._settings.drain_seconds
        try_once(self._queue.redis)
        await self._survive_redis(self.intake.stop)
        while self.leases.is_busy and not now.is_set() and time.monotonic() < deadline:
            for task in self._tasks:
                if task.done():
                    task.result()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await now.wait()

    async def stop(self) -> None:
        """Stop all parts, give held requests back with their progress, and leave the queue.

        Logs errors of Redis. If Redis does not answer, retries until the leases have expired.
        """
        self.heartbeat.about.state = "draining"
        try_once(self._queue.redis)
        await self._survive_redis(self.intake.stop)
        await end(self._tasks)
        await self._survive_redis(self._publisher.flush)
        has_failed = self.engine.has_failed and self.engine.abilities.is_at_risk
        broken = has_failed or self._watchdog.engine_hangs
        for lease in self.leases:  # no need to wait for the running step, whose outputs are dropped
            is_suspect = broken and lease.state is LeaseState.RUNNING
            self.leases.returning(lease, crashed=is_suspect)
        leases_end_at = self._reaper.reached_at + self._queue.lease_ms / 1000
        seconds = leases_end_at - time.monotonic()  # then the leases have expired anyway
        await self._survive_redis(lambda: self._exchange.give_back(seconds))
        for lease in self.leases:
            self._exit_log.note(lease, Exit.of(lease))
        await self.engine.stop(patience=self._settings.stuck_seconds)
        if self.served.grammars is not None and not self.intake.is_preparing:
            await asyncio.to_thread(self.served.grammars.close)
        await self._survive_redis(self._reaper.leave)
        await self._survive_redis(self.heartbeat.leave)

    @property
    def health(self) -> Health:
        return Health(
            has_started=self._has_started,
            is_claiming=self._has_started and self.heartbeat.about.state == "running",
            hangs=self._watchdog.reason,
        )

    async def _note_queue(self) -> None:
        # Gateways of several queues read the list.
        try:
            await self._queue.run(lookups.note_queue(self._queue.keys.queue))
        except NoPermissionError:
            if not self._was_refused:
                self._was_refused = True
                self._log.warning(
                    "gateways that serve all queues will not find this one: the Redis user may not"
                    " add to promptq:queues; create the users again (promptq acl)"
                )

    async def _look_at_maxmemory_policy(self) -> None:
        self._maxmemory_log.note(await self._queue.run(maxmemory_warning()))

    async def _beat(self) -> None:
        self.intake.num_workers = await self.heartbeat.beat()
        self._exchange.note_heartbeat()

    async def _compare_lengths(self) -> None:
        # Other workers of the queue may have to continue this worker's streams.
        keys, own = self._queue.keys, self.engine.limits.max_model_len
        for worker_id in await self._queue.run(lookups.live_worker_ids(keys, 0)):
            other = await self._queue.run(lookups.worker_stats(keys, worker_id))
            if other is not None and other.max_model_len not in (0, own):
                self._log.warning(
                    "another worker of the queue has another length limit, so streams that move"
                    " between them may be cut short; give all workers the same --max-model-len",
                    max_model_len=own,
                    other_max_model_len=other.max_model_len,
                    other_worker_id=worker_id,
                )
                return

    async def _notify_service_manager(self) -> None:
        if not self._watchdog.reason:
            notify("WATCHDOG=1")

    async def _every(self, seconds: float, action: Any) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._survive_redis(action)

    async def _survive_redis(self, action: Any) -> None:
        try:
            await action()
        except (RedisError, OSError) as error:
            note_failure(error)
        except SpoiltRecordError as error:
            note(error)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))
