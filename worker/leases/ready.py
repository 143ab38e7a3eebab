"""The prepared requests that wait for a slot, and the event that wakes the prefetcher."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Set

from promptq.worker.leases.lease import Lease

_RATE_WINDOW_SECONDS = 2.0
_MAX_HAND_OUTS = 100_000
"""The most times in `_hand_outs`. The property `hand_outs_a_second` removes old times, but no code
reads this property if the number of ready requests is fixed (`--prefetch-depth`)."""


class ReadyQueue:
    """The prepared requests that wait for the engine, in queue order. Only `Leases` adds and
    removes requests. The public counts and times are totals since the start."""

    def __init__(self) -> None:
        self.num_handed_out = 0
        self.num_empty = 0
        """How often the engine had a free slot and no request was ready."""
        self.waited_seconds = 0.0
        """Sum of the seconds that requests waited here before they went to the engine."""
        self.filled_seconds = 0.0
        """Sum of the seconds that requests were here, including requests that never ran."""
        self._started_at = self._changed_at = time.monotonic()
        self._since: dict[Lease, float] = {}
        self._heap: list[tuple[tuple[float, str], int, Lease]] = []  # some have been removed since
        self._numbers = itertools.count()
        self._hand_outs: deque[float] = deque(maxlen=_MAX_HAND_OUTS)

    def __len__(self) -> int:
        return len(self._since)

    def first(self) -> Lease | None:
        """Returns the first request in queue order; None if there is none."""
        while self._heap and self._heap[0][2] not in self._since:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def first_of_others(self, tenants: Set[str]) -> Lease | None:
        """Returns the first request of a tenant that is not in `tenants`; None if there is none."""
        others = (lease for lease in self._since if lease.claim.tenant not in tenants)
        return min(others, key=lambda lease: lease.claim.order, default=None)

    def add(self, lease: Lease) -> None:
        self._since[lease] = self._note_change()
        heapq.heappush(self._heap, (lease.claim.order, next(self._numbers), lease))

    def remove(self, lease: Lease, *, is_handed_out: bool) -> None:
        now = self._note_change()
        since = self._since.pop(lease)
        if is_handed_out:
            self.waited_seconds += now - since
            self.num_handed_out += 1
            self._hand_outs.append(now)

    @property
    def hand_outs_a_second(self) -> float:
        """Requests per second that went to the engine, averaged over the last two seconds."""
        horizon = time.monotonic() - _RATE_WINDOW_SECONDS
        while self._hand_outs and self._hand_outs[0] < horizon:
            self._hand_outs.popleft()
        return len(self._hand_outs) / _RATE_WINDOW_SECONDS

    @property
    def mean_wait_seconds(self) -> float:
        """Mean seconds that a ready request waited for the engine."""
        return self.waited_seconds / max(1, self.num_handed_out)

    @property
    def mean_length(self) -> float:
        """Mean over time of the number of ready requests."""
        return self.filled_seconds / max(time.monotonic() - self._started_at, 1e-9)

    def _note_change(self) -> float:
        now = time.monotonic()
        self.filled_seconds += len(self._since) * (now - self._changed_at)
        self._changed_at = now
        return now


class WakeUp:
    """Wakes the prefetcher. Any part of the worker may call `work_came` or `room_freed`."""

    def __init__(self) -> None:
        self._num_left = 0
        self._work_came = False
        self._rung = asyncio.Event()

    def work_came(self) -> None:
        """Report that there may be new requests, perhaps more urgent than the running requests."""
        self._work_came = True
        self._rung.set()

    def room_freed(self) -> None:
        """Report that there may be room for requests that are still in the queue."""
        if self._num_left:
            self._rung.set()

    def claimed(self, num_left: int) -> None:
        """Report that a claim has left `num_left` requests in the queue."""
        self._num_left = num_left

    def take(self) -> bool:
        """Forget all reports, before a claim. Returns whether `work_came` was among the reports."""
        self._rung.clear()
        came, self._work_came = self._work_came, False
        if came:
            self._num_left = 1  # until a claim counts; without room, there is none
        return came

    async def wait(self, seconds: float) -> bool:
        """Wait for a call of `work_came` or `room_freed`. Returns False after `seconds`."""
        try:
            async with asyncio.timeout(seconds):  # wait_for may swallow a cancellation
                await self._rung.wait()
        except TimeoutError:
            return False
        return True
