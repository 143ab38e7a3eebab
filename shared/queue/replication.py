"""Operations that wait until the replicas have a script's writes. No code here does I/O.

WAIT counts the replicas that have all earlier writes of the same connection. So the script and WAIT
are sent in one pipeline, which uses one connection to one node. If a call is sent again, the script
recognises the call and writes to the request again. So WAIT covers the first call's writes too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from redis.exceptions import NoScriptError, ReadOnlyError

from promptq.shared.errors import NotReplicatedError
from promptq.shared.protocol.request import NewRequest
from promptq.shared.queue.call import Call, Operation

NOT_RUN = (NoScriptError, ReadOnlyError)
"""Errors after which one call of a pipeline is sent again, alone: redis-py handles these errors
only outside of a pipeline."""

_TRIES = 4
_MOST_SECONDS = 2.5


def seconds_to_wait(client: Any) -> float:
    """Returns the most seconds that WAIT may take: half of the client's `socket_timeout`, or 2.5 s
    without such a timeout."""
    timeout: float | None = client.connection_pool.connection_kwargs.get("socket_timeout")
    return _MOST_SECONDS if timeout is None else timeout / 2


def nonce_of(new: Sequence[NewRequest]) -> str:
    """Returns a nonce that is the same when a caller repeats a call with the same requests."""
    digest = blake2b(digest_size=8)
    for item in new:
        digest.update(f"{item.request_id}\n".encode("utf-8", "surrogatepass"))
        bare = item.request.model_copy(update={"trace_context": None})
        payload = bare.to_payload().encode() if item.payload is None else item.payload
        digest.update(payload)
    return digest.hexdigest()


def replicated(
    call: Call[list[str]],
    seconds: float,
    pipe: Callable[[Sequence[Call[Any]]], Operation[list[Any]]],
    send: Callable[[Call[Any]], Operation[Any]],
) -> Operation[list[str]]:
    """Sends a call that enqueues requests, and waits until all connected replicas have its writes.

    `pipe` sends calls in one pipeline, `send` sends one call alone; both return replies. Raises
    NotReplicatedError if a replica does not acknowledge the writes within `seconds`, or if there is
    no replica.
    """
    online = Call("", ["INFO", "replication"], _num_online)
    num_wanted, num_online, num_acknowledged = 1, 0, 0
    for _ in range(_TRIES):
        wait = Call("", ["WAIT", num_wanted, max(1, int(seconds * 1000))], int)
        replies = yield from pipe([call, wait, online])
        if isinstance(replies[0], NOT_RUN):
            # The next try repeats the call, and waits.
            request_ids = call.read((yield from send(call)))
            continue
        request_ids = call.read(replies[0])
        num_acknowledged, num_online = wait.read(replies[1]), online.read(replies[2])
        if num_acknowledged >= max(1, num_online):
            return request_ids
        if num_wanted >= num_online:
            break
        num_wanted = num_online
    raise _not_replicated(request_ids, num_acknowledged, num_online, seconds)


def _num_online(info: Mapping[str, Any]) -> int:
    replicas = (info.get(f"slave{nth}") for nth in range(int(info["connected_slaves"])))
    return sum(isinstance(each, Mapping) and each.get("state") == "online" for each in replicas)


def _not_replicated(
    request_ids: list[str], num_acknowledged: int, num_online: int, seconds: float
) -> NotReplicatedError:
    which = f"the request {request_ids[0]!r} is"
    if len(request_ids) > 1:
        which = f"the request {request_ids[0]!r} and {len(request_ids) - 1} more are"
    why = "the server has no replica"
    if num_online:
        of = f"{num_acknowledged} of {num_online} replica{'s' * (num_online > 1)}"
        why = f"acknowledged by {of} within {seconds:g} s"
    return NotReplicatedError(
        f"{which} written, but {why}; repeating the call with the same id or idempotency key is"
        " safe",
        request_ids,
    )
