"""Dead letters: requests that were given up because they crash their workers."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from pydantic import BaseModel

from promptq.producer.admin.request_fields import EndedAttempt, ended_attempts, json_object, whole
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call


class DeadLetter(BaseModel):
    """A request that was given up."""

    request_id: str
    buried_at: int
    """Unix milliseconds of the server."""
    crashes: int
    attempts: int
    message: str
    """Why it was given up."""
    payload: str
    """JSON as it was enqueued."""
    num_tokens: int
    """How many tokens it emitted before."""
    history: list[EndedAttempt]
    """The last attempts, oldest first."""


def read_dead_letter(keys: Keys, request_id: str) -> Generator[Call[Any], Any, DeadLetter]:
    """Yields calls, is sent what they give. Raises RequestNotFoundError."""
    record = yield lookups.record(keys, request_id)
    if record.get("state") != "dead":
        raise RequestNotFoundError(f"{request_id!r} is not a dead letter")
    last = json_object(record.get("last_event"))
    return DeadLetter(
        request_id=request_id,
        buried_at=whole(record.get("finished_at")),
        crashes=whole(record.get("crashes")),
        attempts=whole(record.get("attempt")),
        message=(last.get("error") or {}).get("message", ""),
        payload=record.get("payload", ""),
        num_tokens=last.get("index", 0),
        history=ended_attempts(record.get("history")),
    )


def read_dead_letters(keys: Keys, limit: int) -> Generator[Call[Any], Any, list[DeadLetter]]:
    """The latest first. Yields calls, is sent what they give."""
    found = []
    for request_id in (yield lookups.dead_ids(keys, limit)):
        try:
            found.append((yield from read_dead_letter(keys, request_id)))
        except RequestNotFoundError:
            continue  # it was purged between the two calls
    return found
