"""Recognises errors of a server that temporarily cannot serve, and repeats calls until it can."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TypeVar

from redis.backoff import EqualJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
    TryAgainError,
)

T = TypeVar("T")

_BACKOFF = EqualJitterBackoff(cap=2.0, base=0.05)

_LOG_AGAIN_SECONDS = 60.0
_logged_at: dict[str, float] = {}

_LONGEST_TRY_SECONDS = 40.0
"""Of one try, at most this many seconds count. Even a failover of a cluster takes only half a
minute. So if a try takes longer, the process or machine stood still."""


_BUSY = "BUSY"


class BusyError(ConnectionError):
    """The server runs a long script. Counts as a lost connection, like Redis' error LOADING."""


WORTH_TRYING = (ConnectionError, ReadOnlyError, ClusterDownError, TryAgainError)
"""Errors after which redis-py reconnects and repeats a call. MASTERDOWN is a ClusterDownError."""


@cache
def parser_with_busy(kind: Any) -> Any:
    """Returns a redis-py parser class that raises BusyError when the server replies BUSY."""
    classes = {**kind.EXCEPTION_CLASSES, _BUSY: BusyError}
    return type("ParserWithBusy", (kind,), {"EXCEPTION_CLASSES": classes})


def is_busy(error: Exception) -> bool:
    """Returns whether an error means that the server answers but cannot serve yet."""
    kinds = (BusyError, BusyLoadingError, ClusterDownError, TryAgainError)
    # Clients that other code made do not know BUSY.
    return isinstance(error, kinds) or str(error).startswith(f"{_BUSY} ")


def is_away(error: Exception) -> bool:
    """Returns whether a call that failed with this error may succeed later without a change."""
    if isinstance(error, AuthenticationError):
        return False
    return isinstance(error, (ConnectionError, TimeoutError)) or is_busy(error)


def note_failure(error: Exception) -> None:
    """Logs why the server does not accept a call: each reason at most once a minute, because
    several parts of a process meet the same outage."""
    from promptq.shared.runtime.logs import get_logger  # clients may lack structlog

    # The text may have a transaction's command before the reason, and a script's line after it.
    reason = str(error).partition(" script: ")[0].rpartition(" of pipeline caused error: ")[2]
    now = time.monotonic()
    if now >= _logged_at.get(reason, -math.inf) + _LOG_AGAIN_SECONDS:
        _logged_at[reason] = now
        get_logger().warning("Redis does not accept a call, trying again", error=reason)


async def keep_trying(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Repeats `call` until the server accepts it, and returns its value.

    A call is repeated after a lost connection or reply. A call is also repeated while the server
    loads data, is a replica, or is out of memory or disk. Repeating is safe: a script refuses a
    call as a whole, and recognises a call that it has already carried out. Errors about credentials
    or permissions are raised immediately.

    After `seconds` of trying, the last error is raised. Time in which this process stood still does
    not count, because the server had no chance to answer then.
    """
    from promptq.shared.runtime.logs import get_logger

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
                note_failure(error)
        else:
            if failures:
                _logged_at.clear()
                get_logger().info("Redis accepts calls again", failures=failures)
            return value
        pause = _BACKOFF.compute(failures)
        await asyncio.sleep(pause)
        tried_seconds += pause
