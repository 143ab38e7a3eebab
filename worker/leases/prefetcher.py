"""Claims and prepares requests ahead of need, so that the engine does not wait for them."""

from __future__ import annotations

import asyncio
import math
import random
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import get_ident

from redis.exceptions import RedisError

from promptq.shared.errors import InvalidRequestError, SpoiltRecordError
from promptq.shared.protocol.claims import Claims, Room
from promptq.shared.protocol.rows import RowStatus
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import POLL_SECONDS, AsyncRequestQueue
from promptq.shared.queue.spoilt import note
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.metrics import CLAIM_TIME
from promptq.shared.runtime.tasks import end
from promptq.shared.server.retry import note_failure
from promptq.worker.leases.exchange import OVERFLOW, Exchange
from promptq.worker.leases.held_and_lost_leases import Leases
from promptq.worker.leases.lease import Lease, LeaseState
from promptq.worker.leases.meter import Meter
from promptq.worker.leases.prepare_or_resume import Preparation, UnservedFieldError
from promptq.worker.leases.publisher import Publisher
from promptq.worker.leases.rows import PreparedRequest
from promptq.worker.leases.slow_lane import SlowLane
from promptq.worker.leases.token_budget import ClaimPolicy
from promptq.worker.text.grammars.schema_masks import TakesLongError

_JITTER_SECONDS = 0.001
_PUT_OFF_POLL_SECONDS = 0.1
"""Seconds between two polls while a delay of `SlowLane.put_off` is running. No message reports the
end of a delay."""

_MANY_WORKERS = 8
"""If more workers share a queue, a message wakes most of them in vain."""

_WALK_SECONDS = 0.1
"""The most seconds until the next claim, after one that left requests to other workers."""

_Result = PreparedRequest | InvalidRequestError | TakesLongError | None
"""Result of a request's preparation; None if the worker lost or returned the lease earlier."""


class Prefetcher:
    """Claims requests ahead of need, and prepares them in queue order.

    A thread prepares the requests of a claim one after another. A request whose preparation may
    take long goes to the slow lane (separate threads) instead. If the slow lane is full, the
    request returns to the queue with a delay, so that it uses no slot while it waits. The
    prefetcher ends requests that cannot be prepared, and requests that have nothing left to
    generate. A preparation that takes longer than `stuck_seconds` counts as hung.
    """

    def __init__(
        self,
        queue: AsyncRequestQueue,
        leases: Leases,
        preparation: Preparation,
        policy: ClaimPolicy,
        publisher: Publisher,
        exchange: Exchange,
        meter: Meter,
        stuck_seconds: float = math.inf,
    ) -> None:
        self.num_workers = 1
        """Number of the queue's workers, which share requests and spread their claims."""
        self._queue = queue
        self._leases = leases
        self._wake_up = leases.wake_up
        self._preparation = preparation
        self._policy = policy
        self._publisher = publisher
        self._exchange = exchange
        self._meter = meter
        self._stuck_seconds = stuck_seconds
        self._preparing: dict[int, tuple[Lease, float]] = {}  # by thread, with the time of start
        self._slow_lane = SlowLane()
        self._slow: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None  # raised by a task of the slow lane
        self._too_small: Room | None = None  # the room for which the last claim found nothing
        self._looks_first = False  # whether probably no request waits
        self._task: asyncio.Task[None] | None = None
        self._log = get_logger(worker_id=queue.worker_id).bind()  # once, not at each line

    def start(self) -> None:
        """Start claiming. Raises RuntimeError if the prefetcher runs already."""
        if self.is_running:
            raise RuntimeError("the prefetcher runs already")
        self._task = asyncio.create_task(self._run(), name="intake")

    async def stop(self) -> None:
        """Stop claiming, and give back the requests that are ready or being prepared.

        If the preparation of a request hangs, the request's return counts as a crash. If the server
        cannot be reached, the worker keeps the leases. Raises RedisError, OSError.
        """
        if self._task is not None:
            await end([self._task, *self._slow])
            self._task = None
        overdue = (lease for lease in self._overdue if lease.state is LeaseState.PREPARING)
        to_blame = next(overdue, None)  # other overdue requests may only wait for this one
        for lease in self._leases:
            if lease.state in (LeaseState.PREPARING, LeaseState.READY):
                self._leases.returning(lease, crashed=lease is to_blame)
        await self._exchange.give_back()
        if self._queue.has_unanswered_claim:  # this call gives back the requests of the lost reply
            with suppress(RedisError, OSError):
                await self._queue.take_batch(Room(max_count=0, token_budget=0))

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def task(self) -> asyncio.Task[None]:
        """The claiming task, for the worker to watch. Raises RuntimeError before `start`."""
        if self._task is None:
            raise RuntimeError("the prefetcher was not started")
        return self._task

    @property
    def is_preparing(self) -> bool:
        """Whether a thread is preparing a request, perhaps one whose lease is already lost."""
        return bool(self._preparing)

    @property
    def hangs_on(self) -> Lease | None:
        """The lease (perhaps lost) of a request whose preparation hangs, or None. After `stop`, the
        value is always None, because nothing waits for the preparing thread any longer."""
        return next(iter(self._overdue), None) if self.is_running else None

    @property
    def _overdue(self) -> list[Lease]:
        before = time.monotonic() - self._stuck_seconds
        preparing = [*self._preparing.values()]  # a copy, because threads change the dictionary
        return [lease for lease, since in preparing if since < before]

    async def _run(self) -> None:
        while True:
            claimed = 0
            try:
                claimed = await self._fill()
            except (RedisError, OSError) as error:
                note_failure(error)
            except SpoiltRecordError as error:
                note(error)
            if claimed == 0:
                await self._wait()

    async def _wait(self) -> None:
        seconds = _PUT_OFF_POLL_SECONDS if self._slow_lane.has_put_off else POLL_SECONDS
        if not await self._wake_up.wait(seconds):
            self._wake_up.work_came()  # perhaps a message was missed
            self._looks_first = True
            await self._report_prompt_lengths()
        elif self.num_workers > 1:
            self._looks_first = self.num_workers > _MANY_WORKERS  # another worker may be first
            jitter = _JITTER_SECONDS * (self.num_workers - 1)
            await asyncio.sleep(random.uniform(0, jitter))  # noqa: S311 # spreads claims

    async def _fill(self) -> int:
        # Returns the number of requests that were claimed.
        work_came = self._wake_up.take()
        if self._failure is not None:
            raise self._failure
        room = self._policy.room()
        if room.max_count <= 0 and not (work_came and room.preemptible):
            return 0
        if not work_came and self._too_small is not None and not _exceeds(room, self._too_small):
            return 0
        claims = await self._claim(room)
        self._wake_up.claimed(claims.num_pending)
        self._too_small = None if claims else room
        if not claims:
            if claims.next_skip and not await self._wake_up.wait(_WALK_SECONDS):
                self._wake_up.work_came()  # this claim left requests to other workers
            return 0
        self._meter.note_claims(claims)
        for claim in claims:
            if (earlier := self._leases.by_request(claim.request_id)) is not None:
                self._exchange.take_answer(earlier, RowStatus.FENCED)
        leases = self._leases.claimed(claims)
        await self._take(leases, await asyncio.to_thread(self._prepare, leases))
        if self._leases.some_return.is_set():  # before the next claim, because returns free room
            await self._exchange.give_back()
        return len(claims)

    async def _claim(self, room: Room) -> Claims:
        looks_first, self._looks_first = self._looks_first, False
        if looks_first and not self._queue.has_unanswered_claim:
            fingerprint = "" if self._policy.is_overflow else self._queue.model.fingerprint
            if not await self._queue.run(scripts.has_work(fingerprint)):
                return Claims()
        started = time.monotonic()
        claims = await self._queue.take_batch(replace(room, num_sharing=self.num_workers))
        self._meter.observe(CLAIM_TIME, time.monotonic() - started)
        return claims

    async def _take(self, leases: list[Lease], results: list[_Result]) -> None:
        # Gives a request back if its end cannot be published.
        failed: list[tuple[Lease, InvalidRequestError]] = []
        for lease, result in zip(leases, results, strict=True):
            if result is None or lease.state is not LeaseState.PREPARING:
                continue
            if isinstance(result, TakesLongError):
                self._prepare_later(lease)
                continue
            self._log.debug("claimed", request_id=lease.request_id, attempt=lease.claim.attempt)
            if isinstance(result, InvalidRequestError):
                failed.append((lease, result))
            else:
                self._leases.prepared(lease, result)
        self._leases.feed()
        complete = [lease for lease in leases if lease.state is LeaseState.ENDING]
        try:
            if unserved := [
                (lease, need)
                for lease, error in failed
                if lease.state is LeaseState.PREPARING and (need := self._need(error)) is not None
            ]:
                await self._exchange.leave_to_others(unserved)
            for lease, error in failed:
                if lease.state is LeaseState.PREPARING:
                    self._meter.num_refused += 1
                    await self._publisher.refuse(lease, error)
            for lease in complete:
                if lease.state is LeaseState.ENDING:
                    await self._publisher.complete(lease)
        finally:
            for lease in [*complete, *(lease for lease, _ in failed)]:
                self._leases.returning(lease)

    def _need(self, error: InvalidRequestError) -> str | None:
        """Returns what the request needs from another worker, as a name for `leave_to_others`; None
        if no other worker could prepare the request."""
        if self._policy.is_overflow:
            return OVERFLOW
        return error.ability if isinstance(error, UnservedFieldError) else None

    def _prepare_later(self, lease: Lease) -> None:
        if self._leases.set_aside(lease):
            task = asyncio.create_task(self._prepare_slowly(lease))
            self._slow.add(task)
            task.add_done_callback(self._end_slow)
        else:
            delay_ms = int(self._slow_lane.put_off(lease.claim.tenant) * 1000)
            self._leases.returning(lease, delay_ms=delay_ms)

    async def _prepare_slowly(self, lease: Lease) -> None:
        prepare = partial(self._prepare, [lease], only_quick=False)
        results = await self._slow_lane.run(lease.claim.tenant, prepare)
        try:
            await self._take([lease], results)
        except (RedisError, OSError) as error:
            self._log.warning("a request's end was not published, trying again", error=str(error))

    def _end_slow(self, done: asyncio.Task[None]) -> None:
        self._slow.discard(done)
        if not done.cancelled() and (error := done.exception()) is not None:
            self._failure = error
            self._wake_up.work_came()

    async def _report_prompt_lengths(self) -> None:
        # Lengths of running requests are sent with their rows.
        ready = (lease for lease in self._leases if lease.state is LeaseState.READY)
        if unreported := [lease for lease in ready if lease.has_unreported_length]:
            with suppress(RedisError, OSError):  # the next renewal of the leases sends them too
                await self._exchange.renew(unreported)

    def _prepare(self, leases: list[Lease], *, only_quick: bool = True) -> list[_Result]:
        try:
            return [self._prepare_one(lease, only_quick) for lease in leases]
        finally:
            self._preparing.pop(get_ident(), None)

    def _prepare_one(self, lease: Lease, only_quick: bool) -> _Result:
        if lease.state is not LeaseState.PREPARING:
            return None
        self._preparing[get_ident()] = (lease, time.monotonic())
        try:
            return self._preparation.prepare(lease.claim, only_quick=only_quick)
        except (InvalidRequestError, TakesLongError) as error:
            return error
        except BaseException as error:  # also a panic; one failure must not stop other requests
            self._log.exception("preparation failed", request_id=lease.request_id)
            return InvalidRequestError(f"payload: {error}", "payload", "internal_error")


def _exceeds(room: Room, other: Room) -> bool:
    return room.max_count > other.max_count or room.token_budget > other.token_budget
