"""Prefetch: claims and tokenises ahead of need, so that the engine never waits for either."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import get_ident

from redis.exceptions import RedisError

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.claims import Claim, Room
from promptq.shared.queue.request_queue import POLL_SECONDS, AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.metrics import CLAIM_TIME, Histogram
from promptq.shared.runtime.tasks import end
from promptq.worker.intake.slow_lane import SlowLane
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.leases import Leased, Leases, release
from promptq.worker.leases.preparation import Preparation, TakesLongError

_WORK_AHEAD_SECONDS = 0.1
_RATE_WINDOW_SECONDS = 2.0
_MAX_DEPTH = 4096
_JITTER_SECONDS = 0.001
_PUT_OFF_POLL_SECONDS = 0.1
"""Nobody tells when the delay of what was put off is over."""

_Outcome = Lease | InvalidRequestError | None
"""What became of a claim; None for what was lost meanwhile."""


@dataclass(slots=True)
class IntakeMetrics:
    """Totals since the start."""

    num_claimed: int = 0
    num_failed: int = 0
    num_handed_out: int = 0
    num_empty: int = 0
    """How often a request was asked for and none was ready."""
    waited_seconds: float = 0.0
    """Time that prepared requests spent ready, until they were handed out."""
    filled_seconds: float = 0.0
    """Ready requests integrated over time: by the time that passed, how full it was on average."""
    started_at: float = 0.0

    @property
    def mean_wait_seconds(self) -> float:
        return self.waited_seconds / self.num_handed_out if self.num_handed_out else 0.0

    @property
    def mean_available(self) -> float:
        elapsed = time.monotonic() - self.started_at
        return self.filled_seconds / elapsed if elapsed > 0 else 0.0


class Prefetcher:
    """Keeps prepared requests ready, in queue order.

    Claims are prepared one after another in a thread; what may take long there goes to the slow
    lane and comes back to its place in the order. Where that is full, it goes back to the queue for
    a while, so that it takes no slot while it waits.

    `room` tells what the worker has room for, given how many to keep ready beyond free slots.
    `on_invalid` ends a request that failed in preparation, `on_complete` one that has nothing left
    to generate; `renew` renews leases and tells prompt lengths; `on_ready` hears that something is
    available, `on_lost` of what is still held of an earlier attempt at a request that was claimed.
    `depth` None adapts to the rate of hand-outs, so that about 100 ms of work lie ready. Claims are
    in `leases` from the first, to be renewed there; one whose preparation takes longer than
    `stuck_seconds` counts as hung. `claim_time` is told how long each claim took.
    """

    def __init__(
        self,
        queue: AsyncRequestQueue,
        leases: Leases,
        preparation: Preparation,
        *,
        room: Callable[[int], Room],
        renew: Callable[[list[Lease]], Awaitable[None]],
        on_ready: Callable[[], None],
        on_lost: Callable[[Lease], None],
        on_invalid: Callable[[Claim, InvalidRequestError], Awaitable[None]],
        on_complete: Callable[[Lease], Awaitable[None]],
        depth: int | None = None,
        stuck_seconds: float = math.inf,
        claim_time: Histogram | None = None,
    ) -> None:
        self.metrics = IntakeMetrics()
        self.num_workers = 1
        """Live workers of the queue: the more there are, the more they spread their claims."""
        self._queue = queue
        self._leases = leases
        self._preparation = preparation
        self._room = room
        self._renew = renew
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_invalid = on_invalid
        self._on_complete = on_complete
        self._fixed_depth = depth
        self._stuck_seconds = stuck_seconds
        self._preparing: dict[int, tuple[Claim, float]] = {}  # by thread, and since when
        self._slow_lane = SlowLane()
        self._slow: dict[tuple[str, str], asyncio.Task[None]] = {}  # by request and fence
        self._broken: BaseException | None = None  # what made one of these fail
        self._claim_time = claim_time or Histogram(CLAIM_TIME)
        self._ready: list[tuple[tuple[float, str], float, Lease]] = []
        self._hand_outs: deque[float] = deque()
        self._fill_changed_at = time.monotonic()
        self._num_pending = 0  # what the last claim left in the queue
        self._work_came = False
        self._too_small: Room | None = None  # what the last claim found nothing for
        self._wake_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._log = get_logger(worker_id=queue.worker_id)

    def start(self) -> None:
        """Begin to claim. Raises RuntimeError if it runs already."""
        if self.is_running:
            raise RuntimeError("the prefetcher runs already")
        self.metrics.started_at = self._fill_changed_at = time.monotonic()
        self._task = asyncio.create_task(self._run(), name="intake")

    async def stop(self) -> None:
        """Stop claiming and give back what is held ready."""
        if self._task is not None:
            await end([self._task, *self._slow.values()])
            self._task = None
            self._slow.clear()
        await self.give_back()
        if self._queue.has_unanswered_claim:  # this call gives back what that one was given
            with suppress(RedisError, OSError):
                await self._queue.take_batch(Room(max_count=0, token_budget=0))

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def task(self) -> asyncio.Task[None]:
        """The running task, for whoever watches over it. Raises RuntimeError before `start`."""
        if self._task is None:
            raise RuntimeError("the prefetcher was not started")
        return self._task

    @property
    def available(self) -> int:
        """How many prepared requests lie ready."""
        return sum(not held.ended for _, _, held in self._ready)

    @property
    def depth(self) -> int:
        """How many requests to keep ready beyond free slots."""
        if self._fixed_depth is not None:
            return self._fixed_depth
        horizon = time.monotonic() - _RATE_WINDOW_SECONDS
        while self._hand_outs and self._hand_outs[0] < horizon:
            self._hand_outs.popleft()
        rate = len(self._hand_outs) / _RATE_WINDOW_SECONDS
        return max(1, min(math.ceil(rate * _WORK_AHEAD_SECONDS), _MAX_DEPTH))

    @property
    def is_preparing(self) -> bool:
        """Whether a thread is at work, perhaps on what was given back or lost meanwhile."""
        return bool(self._preparing)

    @property
    def hangs_on(self) -> Claim | None:
        """The claim whose preparation hangs, if one does, be it held still or not.

        None once it was stopped: nothing waits for that thread then.
        """
        return next(iter(self._overdue), None) if self.is_running else None

    @property
    def to_blame(self) -> Claim | None:
        """The claim whose preparation hangs, if it is held still."""
        return next(filter(self._leases.has_claim, self._overdue), None)

    def wake(self) -> None:
        """New work may have come, perhaps more urgent than what runs."""
        self._work_came = True
        self._wake_up.set()

    def room_freed(self) -> None:
        """There may be room for what the last claim left in the queue."""
        if self._num_pending:
            self._wake_up.set()

    def peek(self) -> Lease | None:
        """The request that `next_or_none` would give."""
        self._drop_ended()
        return self._ready[0][2] if self._ready else None

    def next_or_none(self) -> Lease | None:
        """The first in queue order of what is ready, without waiting."""
        held = self.peek()
        if held is None:
            self.metrics.num_empty += 1
            return None
        self._account_fill()
        _, ready_at, _ = heapq.heappop(self._ready)
        now = time.monotonic()
        self.metrics.waited_seconds += now - ready_at
        self.metrics.num_handed_out += 1
        self._hand_outs.append(now)
        return held

    async def give_back(self) -> None:
        """Return to the queue what lies ready or is being prepared; what hangs there, as a crash.

        It stays here if the server does not take it.
        """
        self._drop_ended()
        self._account_fill()
        ready, self._ready = self._ready, []  # it must not be handed out meanwhile
        to_blame = self.to_blame
        claims = [claim for claim in self._leases.claims if claim is not to_blame]
        held: list[Leased] = [*(held for _, _, held in ready), *claims]
        try:
            await release(self._queue, self._leases, held)
            if to_blame is not None:
                await release(self._queue, self._leases, [to_blame], crashed=True)
        except BaseException:
            self._account_fill()
            self._ready = ready
            raise

    async def _run(self) -> None:
        while True:
            try:
                claimed = await self._fill()
            except (RedisError, OSError) as error:
                self._log.warning("claim failed, trying again", error=str(error))
                claimed = 0
            if claimed == 0:
                await self._wait()

    async def _wait(self) -> None:
        try:
            seconds = _PUT_OFF_POLL_SECONDS if self._slow_lane.has_put_off else POLL_SECONDS
            async with asyncio.timeout(seconds):  # wait_for may swallow a cancellation
                await self._wake_up.wait()
        except TimeoutError:
            self._work_came = True  # perhaps its message was missed
            await self._tell_prompt_tokens()
            return
        if self.num_workers > 1:
            jitter = _JITTER_SECONDS * (self.num_workers - 1)
            await asyncio.sleep(random.uniform(0, jitter))  # noqa: S311 # spreads claims

    async def _fill(self) -> int:
        """Claim and prepare once; gives how many were claimed."""
        self._wake_up.clear()
        if self._broken is not None:
            raise self._broken
        claims = self._leases.claims
        if left := [it for it in claims if _key(it) not in self._slow]:  # by a turn that failed
            await release(self._queue, self._leases, left)
        work_came, self._work_came = self._work_came, False
        room = self._room(self.depth)
        if room.max_count <= 0 and not (work_came and room.preemptible):
            return 0
        if not work_came and self._too_small is not None and not _more(room, self._too_small):
            return 0
        started = time.monotonic()
        claims = await self._queue.take_batch(room)
        self._claim_time.add(time.monotonic() - started)
        self._num_pending = claims.num_pending
        self._too_small = None if claims else room
        if claims.next_skip:
            self.wake()  # there is more to look at behind what this worker can never take
        if not claims:
            return 0
        self.metrics.num_claimed += len(claims)
        for claim in claims:
            if (earlier := self._leases.by_request(claim.request_id)) is not None:
                self._on_lost(earlier)
        self._leases.add_claims(claims)
        prepared = await asyncio.to_thread(self._prepare, claims)
        outcomes: list[tuple[Claim, _Outcome]] = []
        too_many: list[Claim] = []
        for claim, outcome in zip(claims, prepared, strict=True):
            if not isinstance(outcome, TakesLongError):
                outcomes.append((claim, outcome))
            elif not self._leases.has_claim(claim):
                continue
            elif self._leases.set_aside(claim):
                self._slow[_key(claim)] = task = asyncio.create_task(self._prepare_slowly(claim))
                task.add_done_callback(partial(self._end_slow, _key(claim)))
            else:
                too_many.append(claim)
        await self._take(outcomes)
        if too_many:
            delays_ms = [int(self._slow_lane.put_off(it.tenant) * 1000) for it in too_many]
            await release(self._queue, self._leases, too_many, delays_ms=delays_ms)
        return len(claims)

    async def _prepare_slowly(self, claim: Claim) -> None:
        try:
            outcome = await self._slow_lane.run(claim.tenant, lambda: self._prepare_slow(claim))
            await self._take([(claim, outcome)])
        except (RedisError, OSError) as error:
            self._log.warning("a request's end was not told, trying again", error=str(error))

    def _end_slow(self, key: tuple[str, str], done: asyncio.Task[None]) -> None:
        self._slow.pop(key, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            self._broken = error
            self._wake_up.set()

    async def _take(self, outcomes: list[tuple[Claim, _Outcome]]) -> None:
        """Hand on what was prepared."""
        self._account_fill()
        failed, complete = [], []
        for claim, outcome in outcomes:
            if outcome is None or not self._leases.has_claim(claim):
                continue
            self._log.debug("claimed", request_id=claim.request_id, attempt=claim.attempt)
            if isinstance(outcome, InvalidRequestError):
                failed.append((claim, outcome))
            elif outcome.is_at_end:
                complete.append(outcome)
            else:
                self._leases.add(outcome)
                heapq.heappush(self._ready, (claim.order, time.monotonic(), outcome))
        self._on_ready()
        self.metrics.num_failed += len(failed)
        for claim, error in failed:
            await self._on_invalid(claim, error)
            self._leases.drop(claim)
        for held in complete:
            await self._on_complete(held)
            self._leases.drop(held.claim)

    async def _tell_prompt_tokens(self) -> None:
        """Tell the exact prompt lengths of what lies here; of the others their first row tells."""
        if untold := [it for _, _, it in self._ready if not (it.ended or it.prompt_tokens_told)]:
            with suppress(RedisError, OSError):  # a renewal of the leases tells them too
                await self._renew(untold)

    @property
    def _overdue(self) -> list[Claim]:
        before = time.monotonic() - self._stuck_seconds
        # A copy, as threads may change it at any time.
        return [claim for claim, since in [*self._preparing.values()] if since < before]

    def _prepare(self, claims: list[Claim]) -> list[_Outcome | TakesLongError]:
        """Runs in a thread of its own, but only the quick ones."""
        try:
            return [self._prepare_one(claim, only_quick=True) for claim in claims]
        finally:
            self._preparing.pop(get_ident(), None)

    def _prepare_slow(self, claim: Claim) -> _Outcome:
        """Runs in a thread of the slow lane."""
        try:
            outcome = self._prepare_one(claim, only_quick=False)
        finally:
            self._preparing.pop(get_ident(), None)
        return None if isinstance(outcome, TakesLongError) else outcome

    def _prepare_one(self, claim: Claim, *, only_quick: bool) -> _Outcome | TakesLongError:
        if not self._leases.has_claim(claim):
            return None
        self._preparing[get_ident()] = (claim, time.monotonic())
        try:
            return self._preparation.prepare(claim, only_quick=only_quick)
        except (InvalidRequestError, TakesLongError) as error:
            return error
        except Exception as error:  # whatever it is, it is this request's alone
            self._log.exception("preparation failed", request_id=claim.request_id)
            return InvalidRequestError(f"payload: {error}", "payload", "internal_error")

    def _drop_ended(self) -> None:
        while self._ready and self._ready[0][2].ended:
            self._account_fill()
            heapq.heappop(self._ready)

    def _account_fill(self) -> None:
        now = time.monotonic()
        self.metrics.filled_seconds += len(self._ready) * (now - self._fill_changed_at)
        self._fill_changed_at = now


def _key(claim: Claim) -> tuple[str, str]:
    return claim.request_id, claim.fence


def _more(room: Room, than: Room) -> bool:
    return room.max_count > than.max_count or room.token_budget > than.token_budget
