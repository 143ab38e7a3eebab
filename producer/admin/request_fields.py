"""Reads fields of a request's hash. Any program may have written them, so their form is checked."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

from promptq.shared.queue.call import text_of
from promptq.shared.queue.spoilt import readable
from promptq.shared.runtime.large_json import object_in
from promptq.shared.runtime.turns import Work


class EndedAttempt(BaseModel):
    """One attempt that did not finish its request. Times are Unix milliseconds of the server."""

    attempt: int = 0
    worker: str = ""
    claimed_at: int = 0
    ended_at: int = 0
    how: str = ""
    """How the attempt ended: `crashed`, `crashed alone`, `given back`, or `its claim was lost`."""


def whole(value: str | bytes | None) -> int:
    """Parses a whole number. Returns 0 if `value` is no whole number."""
    text = text_of(value or "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def json_object(text: str | bytes | None) -> dict[str, Any]:
    """Parses a JSON object. Returns {} if `text` is no JSON object."""
    value = _parsed(text)
    return value if isinstance(value, dict) else {}


def object_in_parts(text: str | None) -> Work[dict[str, Any]]:
    """Parses a large JSON object in slices. Returns {} if `text` is no JSON object."""
    try:
        return (yield from object_in(text or "", {}))
    except (ValueError, RecursionError):
        return {}


def ended_attempts(text: str | None) -> list[EndedAttempt]:
    """Parses the field `history` of a request's hash. Returns the attempts, oldest first."""
    items = _parsed(text)
    return readable(
        "history", items if isinstance(items, list) else [], EndedAttempt.model_validate
    )


def _parsed(text: str | bytes | None) -> Any:
    try:
        return from_json(text or "null", allow_inf_nan=False)
    except ValueError:
        return None
