"""Where preparations that take long are done, beside all others and a few at a time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

_MAX_THREADS = 4
_MAX_THREADS_OF_TENANT = 2
"""So that one tenant leaves a thread to others, whatever it sends."""

_USUAL_SECONDS = 0.05
"""What a function is taken to need until one of its tenant has shown it."""
_MIN_PUT_OFF_SECONDS = 0.1
_MAX_PUT_OFF_SECONDS = 60.0

T = TypeVar("T")


class SlowLane:
    """Runs functions in threads; those that wait for one go by turns of their tenants."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # whose turn is next comes first
        self._running: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}  # that a tenant's functions take now
        self._put_off_until: dict[str, float] = {}  # the last of a tenant's

    @property
    def has_put_off(self) -> bool:
        """Whether something that was put off has not come back yet."""
        now = time.monotonic()
        return any(until > now for until in self._put_off_until.values())

    def put_off(self, tenant: str) -> float:
        """For how many seconds to put off one more, for which there is no place here.

        About until the tenant's turn would come, behind what it has here and what was put off
        before: what comes back too early costs a claim for nothing.
        """
        now = time.monotonic()
        self._put_off_until = {it: at for it, at in self._put_off_until.items() if at > now}
        seconds = self._seconds.get(tenant, _USUAL_SECONDS) / _MAX_THREADS_OF_TENANT
        here = len(self._waiting.get(tenant, ())) * seconds
        before = self._put_off_until.get(tenant, now + max(here, _MIN_PUT_OFF_SECONDS))
        until = min(before + seconds, now + _MAX_PUT_OFF_SECONDS)
        self._put_off_until[tenant] = until
        return until - now

    async def run(self, tenant: str, function: Callable[[], T]) -> T:
        """The function's result. When cancelled, its thread goes on, and nobody waits for it."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._give_turns()
        try:
            await turn
            started = time.monotonic()
            result = await asyncio.to_thread(function)
            most = 2 * self._seconds.get(tenant, _USUAL_SECONDS)  # one alone may be an exception
            self._seconds[tenant] = min(time.monotonic() - started, most)
            return result
        finally:
            if turn.done() and not turn.cancelled():
                self._running[tenant] -= 1
                self._give_turns()
            if not self._running[tenant] and tenant not in self._waiting:
                self._running.pop(tenant, None)
                self._seconds.pop(tenant, None)

    def _give_turns(self) -> None:
        while self._running.total() < _MAX_THREADS:
            tenant = next((it for it in self._waiting if self._may_run(it)), None)
            if tenant is None:
                return
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the other tenants
            if not turn.cancelled():
                self._running[tenant] += 1
                turn.set_result(None)

    def _may_run(self, tenant: str) -> bool:
        return self._running[tenant] < _MAX_THREADS_OF_TENANT
