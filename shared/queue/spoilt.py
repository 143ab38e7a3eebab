"""Skips and logs spoilt records: records in Redis that break the protocol.

Any program that may write to a queue can spoil its records. Code that reads many records uses
`readable`, or `errors_logged` around each record. Both log a spoilt record and go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import ValidationError
from redis.exceptions import RedisError, ResponseError

from promptq.shared.errors import PromptqError, RedisSideError, SpoiltRecordError
from promptq.shared.runtime.printable import printable

T = TypeVar("T")
U = TypeVar("U")

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that code raises when it reads a value of an unexpected type."""

_TURN_SECONDS = 60.0
_MOST_IN_A_TURN = 10
_SHOWN_CHARACTERS = 200
_log = logging.getLogger("promptq.records")  # clients may lack structlog


def is_wrong_type(reply: object) -> bool:
    """Returns whether the server replied that a key has another type than the command needs."""
    if not isinstance(reply, ResponseError):
        return False
    text = str(reply)  # redis-py puts words before it in a transaction
    return text.startswith("WRONGTYPE") or "caused error: WRONGTYPE" in text


def spoilt_record(name: str, why: Exception | str) -> SpoiltRecordError:
    """Returns the error for the record with this name."""
    if isinstance(why, ValidationError):
        first = why.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    fault = printable(str(why) or type(why).__name__)[:_SHOWN_CHARACTERS]
    return SpoiltRecordError(f"{printable(name)[:_SHOWN_CHARACTERS]}: a spoilt record: {fault}")


def note(error: Exception, name: str = "") -> None:
    """Logs an error of one record: each message once a minute, and at most ten messages a minute.

    An error that promptq does not expect is logged with the record's `name` and a traceback.
    """
    logged = _logged_in(int(time.monotonic() / _TURN_SECONDS))
    message = f"{name}: {error}" if name else str(error)
    if message not in logged and len(logged) < _MOST_IN_A_TURN:
        logged.add(message)
        is_foreseen = isinstance(error, PromptqError)
        _log.warning("%s", printable(message), exc_info=None if is_foreseen else error)


@contextmanager
def errors_logged(name: str, stop: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Context manager that logs an error of the record with this name instead of raising it.

    Raises errors of the server or the connection, because they concern all records. Also raises
    errors of the class `stop`, such as the exception of a signal handler.
    """
    try:
        yield
    except stop:
        raise
    except SpoiltRecordError as error:
        note(error)
    except (RedisError, RedisSideError, OSError) as error:
        if not is_wrong_type(error):
            raise
        note(spoilt_record(name, error))
    except Exception as error:
        note(error, name)


@contextmanager
def deleted_if_spoilt(client: Any, key: str) -> Iterator[None]:
    """Context manager around commands. If a command fails because `key` has another type, logs the
    error and deletes the key."""
    try:
        yield
    except ResponseError as error:
        if not is_wrong_type(error):
            raise
        note(spoilt_record(key, error))
        client.delete(key)


def readable(name: str, items: Iterable[T], read: Callable[[T], U]) -> list[U]:
    """Returns the results of `read` for the items of a record, without items that are spoilt."""
    results: list[U] = []
    for item in items:
        try:
            results.append(read(item))
        except UNREADABLE as error:
            note(spoilt_record(name, error))
    return results


@lru_cache(maxsize=1)
def _logged_in(turn: int) -> set[str]:
    return set()
