"""Fields of a request's hash as values; a stranger may have written anything into them."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ValidationError


class EndedAttempt(BaseModel):
    """One attempt that did not finish its request. Times are Unix milliseconds of the server."""

    attempt: int = 0
    worker: str = ""
    claimed_at: int = 0
    ended_at: int = 0
    how: str = ""
    """`crashed`, `crashed alone`, `given back`, or `its claim was lost`."""


def whole(text: str | None) -> int:
    """A whole number, 0 where there is none: anybody may have written the field."""
    text = text or ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def json_object(text: str | None) -> dict[str, Any]:
    """A JSON object, empty where there is none."""
    value = _parsed(text)
    return value if isinstance(value, dict) else {}


def ended_attempts(text: str | None) -> list[EndedAttempt]:
    """What `history` holds, the oldest first."""
    items = _parsed(text)
    found = []
    for item in items if isinstance(items, list) else []:
        try:
            found.append(EndedAttempt.model_validate(item))
        except ValidationError:
            continue
    return found


def _parsed(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except ValueError:
        return None
