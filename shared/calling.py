"""One round trip to the queue's server, and how its reply is read; does no I/O itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Generic, TypeVar

from redis.exceptions import ResponseError

T = TypeVar("T")

SCRIPT_NAMES = (
    "enqueue", "claim", "publish", "release", "cancel", "reap", "requeue", "purge", "heartbeat",
    "sweep", "waiting", "priorities", "sample", "reprioritise", "limit",
)  # fmt: skip

_SHARED_PARTS = ("_common", "_tenants", "_log", "_moves", "_crashes")

_FURTHER_PARTS = {
    "claim": ["_sharing"],
    "cancel": ["_places"],
    "reprioritise": ["_places"],
    "sweep": ["_places"],
    "priorities": ["_priorities"],
    "sample": ["_priorities"],
}


@cache
def script_text(name: str) -> str:
    """The source of one script, with what all of them share in front."""
    folder = resources.files("shared") / "lua"
    parts = [*_SHARED_PARTS, *_FURTHER_PARTS.get(name, []), name]
    return "".join((folder / f"{part}.lua").read_text() for part in parts)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One round trip: a script by name, or with `script` empty a plain command."""

    script: str
    args: list[str | bytes | int]
    parse: Callable[[Any], T]


def text_of(value: str | bytes | int) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def texts_of(values: Iterable[Any]) -> list[str]:
    return [text_of(value) for value in values]


def ids_of(values: Iterable[bytes]) -> list[str]:
    """Ids as a stranger may have put them in: bytes that are no text come as surrogates."""
    return [value.decode("utf-8", "surrogateescape") for value in values]


def is_wrong_type(reply: object) -> bool:
    """Whether a server says so that a key is of another type than the command is for."""
    return isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE")


def text_map(reply: Any) -> dict[str, str]:
    """A hash as text, whichever protocol it came by; a stranger's bytes may be none."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {_as_read(name): _as_read(value) for name, value in pairs}


def _as_read(value: bytes) -> str:
    return value.decode("utf-8", "replace")
