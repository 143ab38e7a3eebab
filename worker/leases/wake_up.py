"""Wakes the intake when new work comes, or when there is room for what the last claim left."""

from __future__ import annotations

import asyncio


class WakeUp:
    """Any part may ring. Only the intake waits."""

    def __init__(self) -> None:
        self.num_left = 0
        """How many requests the last claim left in the queue."""
        self._work_came = False
        self._rung = asyncio.Event()

    def work_came(self) -> None:
        """There may be new requests, perhaps more urgent than the running ones."""
        self._work_came = True
        self._rung.set()

    def room_freed(self) -> None:
        """There may be room for requests that the last claim left."""
        if self.num_left:
            self._rung.set()

    def take(self) -> bool:
        """Begin a turn. Returns whether new work may have come since the last one."""
        self._rung.clear()
        came, self._work_came = self._work_came, False
        return came

    async def wait(self, seconds: float) -> bool:
        """Wait until it rings. Returns False if `seconds` are over first."""
        try:
            async with asyncio.timeout(seconds):  # wait_for may swallow a cancellation
                await self._rung.wait()
        except TimeoutError:
            return False
        return True
