"""Logs the warning about a server that evicts keys. Clients have no log, so they do not load it."""

from __future__ import annotations

import time
from collections.abc import Callable

from promptq.shared.runtime.logs import get_logger

LOOK_SECONDS = 5.0
"""The time between two looks at the policy, which an operator may change at any time."""

_REPEAT_SECONDS = 60.0


class EvictionLog:
    """Logs the warning at once, again every minute while it holds, and when it is over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged = ""
        self._repeat_at = 0.0
        self._look_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the last look was `LOOK_SECONDS` ago."""
        return self._clock() >= self._look_at

    def note(self, warning: str) -> None:
        """Log what a look at the server showed, if it is news or due again."""
        now = self._clock()
        if warning and (warning != self._logged or now >= self._repeat_at):
            get_logger().warning(warning)
            self._repeat_at = now + _REPEAT_SECONDS
        elif self._logged and not warning:
            get_logger().info("the server no longer evicts keys")
        self._logged, self._look_at = warning, now + LOOK_SECONDS
