"""Warns if a Redis server's `maxmemory-policy` deletes keys of the queue when memory is full.

The policy comes from `INFO memory`, because roles and managed services forbid `CONFIG GET`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from promptq.shared.queue.call import Call

LOOK_SECONDS = 5.0
"""Seconds between two checks of the policy, which an operator may change at any time."""

_REPEAT_SECONDS = 60.0
_LOST = {
    "allkeys": "waiting and running requests may vanish, and nobody is notified",
    "volatile": "results, responses, batches and idempotency keys may vanish before their time",
}
"""The losses that are possible under a policy, by the first word of the policy's name."""


def maxmemory_warning() -> Call[str]:
    """Returns a warning if the server is known to delete keys when memory is full, otherwise ''."""
    return Call("", ["INFO", "memory"], _warning_of, of_refusal=str)


def _warning_of(info: Mapping[str, Any]) -> str:
    policy = str(info.get("maxmemory_policy", ""))
    lost = _LOST.get(policy.partition("-")[0])
    if lost is None or not info.get("maxmemory"):
        return ""
    return (
        f"the server evicts keys when its memory is full (maxmemory-policy {policy}): {lost};"
        " set maxmemory-policy noeviction"
    )


class MaxmemoryLog:
    """Logs a new warning, repeats a lasting warning every minute, and logs the end of a warning."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged = ""
        self._repeat_at = 0.0
        self._look_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether `LOOK_SECONDS` have passed since the last check."""
        return self._clock() >= self._look_at

    def note(self, warning: str) -> None:
        """Logs a check's result ('' is no warning) if the result is new or its repeat is due."""
        from promptq.shared.runtime.logs import get_logger  # clients may lack structlog

        now = self._clock()
        if warning and (warning != self._logged or now >= self._repeat_at):
            get_logger().warning(warning)
            self._repeat_at = now + _REPEAT_SECONDS
        elif self._logged and not warning:
            get_logger().info("the server no longer evicts keys")
        self._logged, self._look_at = warning, now + LOOK_SECONDS
