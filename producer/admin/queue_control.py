"""Operations that control a queue: resume it, drain workers, and change priorities."""

from __future__ import annotations

import json

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.protocol.replies import PriorityStatus
from promptq.shared.protocol.request import MAX_PRIORITY
from promptq.shared.queue import lookups, scripts
from promptq.shared.queue.call import Operation


def resume(keys: Keys, /) -> Operation[None]:
    """Ends a pause of the queue, so that workers get requests again."""
    yield [scripts.set_paused(keys, False), scripts.wake_workers(keys)]


def drain(keys: Keys, /, worker_id: str | None = None) -> Operation[list[str]]:
    """Drains one worker, or all: they finish requests and exit. Returns the workers' ids."""
    now_ms = yield lookups.server_time_ms()
    kinds = yield [lookups.live_worker_ids(keys, now_ms, overflow=each) for each in (False, True)]
    channels = (keys.drain, keys.control)  # workers of earlier releases listen to `control`
    yield [scripts.drain(channel, worker_id) for channel in channels]
    return [each for alive in kinds for each in alive if worker_id is None or each == worker_id]


def reprioritise(keys: Keys, /, request_id: str, priority: int) -> Operation[PriorityStatus]:
    """Changes the priority of a waiting request. Returns a status.

    The request moves in the queue as if it had been enqueued with this priority. A request that a
    worker holds keeps its priority. Raises InvalidRequestError.
    """
    check_request_id(request_id)
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority: {priority} is not between -{MAX_PRIORITY} and {MAX_PRIORITY}",
            field="priority",
        )
    # The payload holds the priority, too: workers decide by it which request makes room. The
    # payload is rewritten here, as Lua's JSON would change large numbers and empty lists.
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
    except (ValueError, TypeError, RecursionError) as error:  # no worker could read it either
        raise InvalidRequestError(f"payload: is no JSON object: {error}", field="payload") from None
    return changed
