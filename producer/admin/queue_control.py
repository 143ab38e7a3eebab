"""What steers a queue: pause, resume, workers that are to drain, and who waits where."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.replies import PriorityStatus
from promptq.shared.protocol.request import MAX_PRIORITY
from promptq.shared.queue import lookups, scripts
from promptq.shared.queue.call import Call


def set_paused(keys: Keys, paused: bool) -> Generator[Call[Any], Any, None]:
    """Yields calls, is sent what they give."""
    yield scripts.set_paused(keys, paused)
    if not paused:
        yield scripts.wake_workers(keys)


def drain_workers(keys: Keys, worker_id: str | None) -> Generator[Call[Any], Any, list[str]]:
    """Tell all workers, or one, to drain; gives those that live. Yields calls as `set_paused`."""
    now_ms = yield lookups.server_time_ms()
    alive = yield lookups.live_worker_ids(keys, now_ms)
    yield scripts.tell_to_drain(keys.drain, worker_id)
    yield scripts.tell_to_drain(keys.control, worker_id)  # where earlier releases listen
    return [it for it in alive if worker_id is None or it == worker_id]


def reprioritise(
    keys: Keys, request_id: str, priority: int
) -> Generator[Call[Any], Any, PriorityStatus]:
    """Give a waiting request another priority. Raises InvalidRequestError. Yields as above.

    The payload bears the priority too, as workers decide by it who makes room for whom; it is
    rewritten here, since Lua's JSON would not keep large numbers and empty lists as they are.
    """
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority: {priority} is not between -{MAX_PRIORITY} and {MAX_PRIORITY}",
            field="priority",
        )
    status = PriorityStatus.STALE
    while status is PriorityStatus.STALE:
        payload = yield lookups.payload(keys, request_id)
        if payload is None:
            return PriorityStatus.UNKNOWN
        new_payload = _with_priority(payload, priority)
        status = yield scripts.reprioritise(request_id, priority, payload, new_payload)
    return status


def _with_priority(payload: bytes, priority: int) -> str:
    try:
        fields = json.loads(payload)
        changed = json.dumps({**fields, "priority": priority}, ensure_ascii=False)
        changed.encode()
    except (ValueError, TypeError) as error:  # no worker could read it either
        raise InvalidRequestError(f"payload: is no JSON object: {error}", field="payload") from None
    return changed
