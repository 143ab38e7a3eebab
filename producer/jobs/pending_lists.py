"""Reads the lists of what waits for the jobs, which strangers may have spoilt."""

from __future__ import annotations

from promptq.shared.queue.call import Call

_LOGGED_CHARACTERS = 100


def entries_of(command: str, key: str, *args: int) -> Call[list[bytes]]:
    """The entries that a command reads of a key; none, with a line in the log, if it is no list."""
    return Call("", [command, key, *args], list, list)


def shown(raw: bytes) -> str:
    """A stranger's entry as a log may have it."""
    return repr(raw)[:_LOGGED_CHARACTERS]
