"""Dead letters: requests that no worker tries again, because they crash their workers."""

from __future__ import annotations

from pydantic import BaseModel

from promptq.producer.admin.request_fields import EndedAttempt, ended_attempts, json_object, whole
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Operation
from promptq.shared.queue.spoilt import readable

_RECORDS = 100
"""The most dead letters to read in one round trip, because each may be large."""


class DeadLetter(BaseModel):
    """A request that no worker tries again, because it crashed its workers."""

    request_id: str
    buried_at: int
    """Time at which the request became a dead letter, in Unix milliseconds of the server."""
    crashes: int
    attempts: int
    message: str
    """Why no worker tries the request again."""
    payload: str
    """The payload as it was enqueued, in JSON."""
    num_tokens: int
    """Number of output tokens that workers had published."""
    history: list[EndedAttempt]
    """The last attempts to serve the request, oldest first."""


def dead_letter(keys: Keys, /, request_id: str) -> Operation[DeadLetter]:
    """Reads one dead letter. Raises RequestNotFoundError."""
    record = yield lookups.record(keys, check_request_id(request_id))
    letter = _dead_letter(request_id, record)
    if letter is None:
        raise RequestNotFoundError(f"{request_id!r} is not a dead letter")
    return letter


def dead_letters(keys: Keys, /, limit: int = 100) -> Operation[list[DeadLetter]]:
    """Reads the dead letters, the latest first."""
    ids = yield lookups.dead_ids(keys, limit)
    dead = []
    for start in range(0, len(ids), _RECORDS):
        page = ids[start : start + _RECORDS]
        records = yield [lookups.record(keys, request_id) for request_id in page]
        letters = readable(
            keys.dead, zip(page, records, strict=True), lambda pair: _dead_letter(*pair)
        )
        dead += [letter for letter in letters if letter is not None]
    return dead


def _dead_letter(request_id: str, record: dict[str, str]) -> DeadLetter | None:
    if record.get("state") != "dead":
        return None
    last = json_object(record.get("last_event"))
    error, index = last.get("error"), last.get("index")
    return DeadLetter(
        request_id=request_id,
        buried_at=whole(record.get("finished_at")),
        crashes=whole(record.get("crashes")),
        attempts=whole(record.get("attempt")),
        message=str(error.get("message", "")) if isinstance(error, dict) else "",
        payload=record.get("payload", ""),
        num_tokens=index if isinstance(index, int) else 0,
        history=ended_attempts(record.get("history")),
    )
