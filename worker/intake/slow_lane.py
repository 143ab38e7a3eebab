"""Where preparations that take long are done, beside all others and a few at a time."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

_MAX_THREADS = 4
_MAX_THREADS_OF_TENANT = 2
"""So that one tenant leaves a thread to others, whatever it sends."""

T = TypeVar("T")


class SlowLane:
    """Runs functions in threads; those that wait for one go by turns of their tenants."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # whose turn is next comes first
        self._running: Counter[str] = Counter()

    async def run(self, tenant: str, function: Callable[[], T]) -> T:
        """The function's result. When cancelled, its thread goes on, and nobody waits for it."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._give_turns()
        try:
            await turn
            return await asyncio.to_thread(function)
        finally:
            if turn.done() and not turn.cancelled():
                self._running[tenant] -= 1
                self._give_turns()

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
