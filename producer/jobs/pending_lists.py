"""Reads the lists of what waits for the jobs, which strangers may have spoilt."""

from __future__ import annotations

from functools import cache

from promptq.shared.queue.call import Call
from promptq.shared.runtime.logs import get_logger

_LOGGED_CHARACTERS = 100


def entries_of(command: str, key: str, *args: int) -> Call[list[bytes]]:
    """The entries that a command reads of a key; none, with a line in the log, if it is no list."""

    def none() -> list[bytes]:
        _warn(key)
        return []

    return Call("", [command, key, *args], list, none)


@cache
def _warn(key: str) -> None:
    """Once for each key: it is read several times a second."""
    get_logger().warning("a list counts as empty: its key has another type", key=key)


def shown(raw: bytes) -> str:
    """A stranger's entry as a log may have it."""
    return repr(raw)[:_LOGGED_CHARACTERS]
