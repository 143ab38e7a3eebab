"""Delays refusals to a key that asks again too early, so that asking costs a gateway little."""

from __future__ import annotations

import asyncio
import time

_MOST_SECONDS = 1.0
"""The longest delay of an answer. Meanwhile only its connection is held."""


class Refusals:
    """When each key that is beyond its rate may come again, for one gateway."""

    def __init__(self) -> None:
        self._may_come_at: dict[str, float] = {}

    async def refuse(self, name: str, wait_ms: int) -> int:
        """Wait if this key was told to come later. Gives what is left of `wait_ms`."""
        now = time.monotonic()
        early = self._may_come_at.get(name, 0.0) - now
        self._may_come_at[name] = now + wait_ms / 1000
        if early <= 0:
            return wait_ms
        seconds = min(early, _MOST_SECONDS)
        await asyncio.sleep(seconds)
        return max(1, wait_ms - int(seconds * 1000))
