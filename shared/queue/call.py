"""One round trip to the queue's server, and how its reply is read; does no I/O itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Generic, TypeVar

from redis.exceptions import ResponseError

T = TypeVar("T")

_FOLDERS = {
    "requests": (
        "enqueue", "claim", "publish", "release", "cancel", "reprioritise", "requeue", "purge",
    ),
    "upkeep": (
        "reap", "sweep", "heartbeat", "hold", "limit", "waiting", "priorities", "statistics",
    ),
}  # fmt: skip

SCRIPT_NAMES = tuple(name for names in _FOLDERS.values() for name in names)

_SHARED_PARTS = ("common", "tenants", "log", "moves", "crashes")

_FURTHER_PARTS = {
    "claim": ["fair_share"],
    "publish": ["rates"],
    "limit": ["rates"],
    "cancel": ["waiting_place"],
    "reprioritise": ["waiting_place"],
    "sweep": ["waiting_place"],
    "priorities": ["priority_counts"],
    "statistics": ["priority_counts"],
}


@cache
def script_text(name: str) -> str:
    """The source of one script, with what all of them share in front."""
    folder = next(folder for folder, names in _FOLDERS.items() if name in names)
    parts = (*_SHARED_PARTS, *_FURTHER_PARTS.get(name, []))
    paths = [*(f"parts/{part}.lua" for part in parts), f"{folder}/{name}.lua"]
    lua = resources.files("promptq.shared") / "lua"
    return "".join((lua / path).read_text() for path in paths)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One round trip: a script by name, or with `script` empty a plain command."""

    script: str
    args: Sequence[str | bytes | int | memoryview]
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
