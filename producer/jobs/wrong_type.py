"""Keys under which a stranger put something of another type."""

from __future__ import annotations

import redis


def is_wrong_type(reply: object) -> bool:
    """Whether it is the error with which a server says so."""
    return isinstance(reply, redis.ResponseError) and str(reply).startswith("WRONGTYPE")
