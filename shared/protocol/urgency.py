"""How soon a request should run, in the words of OpenAI's API: service tiers and windows."""

from __future__ import annotations

from typing import Literal

Tier = Literal["priority", "default", "flex"]

WINDOW = "^[1-9][0-9]{0,3}[mh]$"
WINDOW_IN_WORDS = "a number of minutes or hours, such as 90m or 2h"

_PRIORITIES: dict[str, int] = {"priority": -10, "flex": 10}
_MINUTE_MS = 60_000


def priority_of(tier: str) -> int:
    """Returns the priority of a service tier; 0 for `auto`, `default` and unknown names."""
    return _PRIORITIES.get(tier, 0)


def tier_of(priority: int) -> Tier:
    """Returns the service tier to whose range a priority belongs."""
    if priority <= _PRIORITIES["priority"]:
        return "priority"
    return "flex" if priority >= _PRIORITIES["flex"] else "default"


def window_ms(window: str) -> int:
    """Returns the milliseconds of a completion window, such as `2h`, that matches `WINDOW`."""
    minutes = int(window[:-1]) * (60 if window[-1] == "h" else 1)
    return minutes * _MINUTE_MS
