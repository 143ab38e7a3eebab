"""Reads fields of a request's hash, into which a stranger may have written anything."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

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
    """`crashed`, `crashed alone`, `given back`, or `its claim was lost`."""


def whole(text: str | None) -> int:
    """A whole number; 0 for anything else."""
    text = text or ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def json_object(text: str | bytes | None) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    value = _parsed(text)
    return value if isinstance(value, dict) else {}


def object_in_parts(text: str | None) -> Work[dict[str, Any]]:
    """Parses a text that may be large, in slices; {} if it is no JSON object."""
    try:
        return (yield from object_in(text or "", {}))
    except (ValueError, RecursionError):
        return {}


def ended_attempts(text: str | None) -> list[EndedAttempt]:
    """The attempts in the field `history`, the oldest first."""
    items = _parsed(text)
    return readable(
        "history", items if isinstance(items, list) else [], EndedAttempt.model_validate
    )


def _parsed(text: str | bytes | None) -> Any:
    try:
        return from_json(text or "null", allow_inf_nan=False)
    except ValueError:
        return None
