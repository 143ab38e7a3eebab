"""What wakes the intake: new work, or room for what the last claim left in the queue."""

from __future__ import annotations

import asyncio


class WakeUp:
    """Anybody may ring; only the intake waits."""

    def __init__(self) -> None:
        self.num_left = 0
        """Requests that the last claim left in the queue."""
        self._work_came = False
        self._rung = asyncio.Event()

    def work_came(self) -> None:
        """There may be something new, perhaps more urgent than what runs."""
        self._work_came = True
        self._rung.set()

    def room_freed(self) -> None:
        """There may be room for what the last claim left."""
        if self.num_left:
            self._rung.set()

    def take(self) -> bool:
        """Begin a turn; gives whether new work may have come since the last."""
        self._rung.clear()
        came, self._work_came = self._work_came, False
        return came

    async def wait(self, seconds: float) -> bool:
        """Until it rings; False if the time was over first."""
        try:
            async with asyncio.timeout(seconds):  # wait_for may swallow a cancellation
                await self._rung.wait()
        except TimeoutError:
            return False
        return True
