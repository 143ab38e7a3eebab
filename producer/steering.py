"""What steers a whole queue: pause, resume, and workers that are to drain."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from shared import scripts
from shared.keys import Keys
from shared.scripts import Call


def set_paused(keys: Keys, paused: bool) -> Generator[Call[Any], Any, None]:
    """Yields calls, is sent what they give."""
    yield scripts.set_paused(keys, paused)
    if not paused:
        yield scripts.tell_workers(keys, "pending")


def drain_workers(keys: Keys, worker_id: str | None) -> Generator[Call[Any], Any, list[str]]:
    """Tell all workers, or one, to drain; gives those that live. Yields calls as `set_paused`."""
    now_ms = yield Call("", ["TIME"], lambda reply: int(reply[0]) * 1000)
    alive = yield scripts.live_worker_ids(keys, now_ms)
    yield scripts.tell_workers(keys, f"drain:{worker_id}" if worker_id else "drain")
    return [it for it in alive if worker_id is None or it == worker_id]
