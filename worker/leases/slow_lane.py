"""Runs slow preparations in a few threads, so that quick preparations need not wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

_MAX_THREADS = 4
_MAX_THREADS_OF_TENANT = 2  # so that some threads are left to other tenants

_USUAL_SECONDS = 0.05  # until a function of the tenant was measured
_MIN_PUT_OFF_SECONDS = 0.1
_MAX_PUT_OFF_SECONDS = 60.0

T = TypeVar("T")


class SlowLane:
    """Runs functions in a few threads. Tenants take turns in getting a thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[float]]] = {}
        """Waiting calls of `run`, by tenant. The tenant that gets the next thread comes first."""
        self._running: dict[str, list[float]] = {}  # by tenant: when it got its threads
        self._seconds: dict[str, float] = {}  # by tenant: the time of its last function
        self._put_off_until: dict[str, float] = {}  # by tenant: the end of its longest delay

    @property
    def has_put_off(self) -> bool:
        """Whether a delay that `put_off` returned is still running."""
        now = time.monotonic()
        return any(until > now for until in self._put_off_until.values())

    def put_off(self, tenant: str) -> float:
        """Returns the delay in seconds for a request of `tenant` that finds the lane full.

        The delay is the time that the tenant's earlier requests (in the lane, or put off) are
        expected to take. After a shorter delay, the lane would still be full for the tenant.
        """
        now = time.monotonic()
        self._put_off_until = {
            other: until for other, until in self._put_off_until.items() if until > now
        }
        so_far = now - (self._running.get(tenant) or [now])[-1]  # of the latest function
        seconds = max(so_far, self._seconds.get(tenant, _USUAL_SECONDS)) / _MAX_THREADS_OF_TENANT
        here = len(self._waiting.get(tenant, ())) * seconds
        before = self._put_off_until.get(tenant, now + max(here, _MIN_PUT_OFF_SECONDS))
        until = min(before + seconds, now + _MAX_PUT_OFF_SECONDS)
        self._put_off_until[tenant] = until
        return until - now

    async def run(self, tenant: str, function: Callable[[], T]) -> T:
        """Run `function` in a thread, and return the result. If the calling task is cancelled, the
        thread continues, and the result is dropped."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._give_turns()
        try:
            started = await turn
            result = await asyncio.to_thread(function)
            most = 2 * self._seconds.get(tenant, _USUAL_SECONDS)  # one slow call may be an outlier
            self._seconds[tenant] = min(time.monotonic() - started, most)
            return result
        finally:
            if turn.done() and not turn.cancelled():
                self._running[tenant].remove(turn.result())
                self._give_turns()
            if not self._running.get(tenant) and tenant not in self._waiting:
                self._running.pop(tenant, None)
                self._seconds.pop(tenant, None)

    def _give_turns(self) -> None:
        while sum(map(len, self._running.values())) < _MAX_THREADS:
            num = {each: len(self._running.get(each, ())) for each in self._waiting}
            tenants = (each for each in num if num[each] < _MAX_THREADS_OF_TENANT)
            if (tenant := next(tenants, None)) is None:
                return
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the other tenants
            if not turn.cancelled():
                turn.set_result(time.monotonic())
                self._running.setdefault(tenant, []).append(turn.result())
