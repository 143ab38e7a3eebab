"""Repeats calls that the server did not accept, for a limited time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from promptq.shared.runtime.logs import get_logger

T = TypeVar("T")

_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 2.0

_LONGEST_TRY_SECONDS = 40.0
"""What a try counts at most. None takes longer, not even in a cluster, where a call is repeated for
the half minute of a failover: in the rest this process or its machine stood still."""


async def keep_trying(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Repeat `call` until the server accepts it, and return its value.

    After `seconds` of trying it raises the last error. Time in which this process stood still does
    not count, as the server had no chance to answer. Scripts refuse a call as a whole, and do
    nothing twice, so a call may be repeated after any error: a lost connection or reply, a server
    that loads, is a replica, or is out of memory or disk. Refused credentials are raised at once.
    """
    tried_seconds = 0.0
    failures = 0
    while True:
        started = time.monotonic()
        try:
            value = await call()
        except (AuthenticationError, NoPermissionError):
            raise
        except (RedisError, OSError) as error:
            failures += 1
            tried_seconds += min(time.monotonic() - started, _LONGEST_TRY_SECONDS)
            if tried_seconds >= seconds:
                raise
            if failures == 1:
                get_logger().warning("Redis does not accept a call, trying again", error=str(error))
        else:
            if failures:
                get_logger().info("Redis accepts calls again", failures=failures)
            return value
        longest = min(_FIRST_BACKOFF_SECONDS * 2.0**failures, _MAX_BACKOFF_SECONDS)
        pause = random.uniform(longest / 2, longest)  # noqa: S311 # spreads retries
        await asyncio.sleep(pause)
        tried_seconds += pause
