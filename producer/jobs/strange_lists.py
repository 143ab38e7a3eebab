"""Lists of the queue that a stranger may have made something else of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import redis

from promptq.shared.queue.call import is_wrong_type
from promptq.shared.runtime.logs import get_logger

_LOGGED_CHARACTERS = 100


class Lists:
    """Reads lists; one of another type counts as empty, with one line in the log."""

    def __init__(self, queue: str) -> None:
        self._log = get_logger(queue=queue)
        self._spoilt: set[str] = set()

    def read(self, key: str, read: Callable[[], Iterable[bytes]]) -> list[bytes]:
        try:
            found = list(read())
        except redis.ResponseError as error:
            if not is_wrong_type(error):
                raise
            if key not in self._spoilt:
                self._log.warning("a list counts as empty", key=key, reason=str(error))
                self._spoilt.add(key)
            return []
        self._spoilt.discard(key)
        return found


def shown(raw: bytes) -> str:
    """A stranger's entry as a log may have it."""
    return repr(raw)[:_LOGGED_CHARACTERS]
