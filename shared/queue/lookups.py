"""Calls that read the keys of a queue, and the names of a server's queues.

The functions do no I/O: they build calls, which a queue sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from promptq.shared.protocol.keys import ALIASES, QUEUES, Keys, is_name, is_request_id
from promptq.shared.protocol.request import RequestState
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue.call import Call, Operation, fields_of, ids_of, text_map, text_of


def server_time_ms() -> Call[int]:
    """Reads the server's clock, in Unix milliseconds."""
    return Call("", ["TIME"], lambda reply: int(reply[0]) * 1000 + int(reply[1]) // 1000)


def record(keys: Keys, request_id: str) -> Call[dict[str, str]]:
    """Reads all fields of a request's hash, as text; empty if there is no hash."""
    return Call("", ["HGETALL", keys.request(request_id)], text_map, dict)


def fields(keys: Keys, request_id: str, names: Sequence[str]) -> Call[dict[str, str]]:
    """Reads the named fields of a request's hash as text, without missing fields."""

    def parse(reply: list[bytes | None]) -> dict[str, str]:
        pairs = zip(names, reply, strict=True)
        return {name: text_of(value) for name, value in pairs if value is not None}

    return Call("", ["HMGET", keys.request(request_id), *names], parse, dict)


def payload(keys: Keys, request_id: str) -> Call[bytes | None]:
    """Reads a request's payload as it was enqueued; None if the request is unknown."""
    return Call("", ["HGET", keys.request(request_id), "payload"], lambda reply: reply)


def pictures(keys: Keys, names: Sequence[str]) -> Operation[dict[str, str]]:
    """Reads the data URLs of stored pictures. Returns them by name; leaves out missing pictures."""

    def parse(reply: bytes | None) -> str | None:
        return None if reply is None else text_of(reply)

    calls = [Call("", ["HGET", keys.picture(name), "url"], parse, lambda: None) for name in names]
    urls: list[str | None] = yield calls
    return {name: url for name, url in zip(names, urls, strict=True) if url is not None}


def state(keys: Keys, request_id: str) -> Call[RequestState | None]:
    """Reads the state of a request; None if the request is unknown. A request that a plain Redis
    client has just enqueued has no state field; its state is WAITING."""

    def parse(reply: list[Any]) -> RequestState | None:
        current, payload = reply
        if current is None and payload is None:
            return None
        return state_of(current or b"")

    reading = ["HMGET", keys.request(request_id), "state", "payload"]
    return Call("", reading, parse, lambda: None)


def state_of(field: str | bytes) -> RequestState:
    """Returns the state in a request's field; WAITING if the field names no state."""
    with suppress(ValueError):
        return RequestState(text_of(field))
    return RequestState.WAITING


def log_after(keys: Keys, request_id: str, position: int) -> Call[list[bytes]]:
    """Reads the last event, and the events with tokens after the first `position`, from the log."""

    def parse(reply: list[Any]) -> list[bytes]:
        return [fields_of(entry).get(b"event", b"") for _, entry in reply]

    # The caller has the entry `position-0`. A last event without a token has the id `position-1`.
    return Call("", ["XRANGE", keys.tokens(request_id), f"({position}-0", "+"], parse)


def contains(keys: Keys, request_id: str) -> Call[bool]:
    """Reads whether the request waits in the queue."""
    return Call("list_waiting", [0, request_id], lambda reply: bool(reply[1]))


def count(keys: Keys) -> Call[int]:
    """Reads the number of waiting requests of all tenants, without delayed requests."""
    return Call("list_waiting", [0, ""], lambda reply: int(reply[0]), keys=keys)


def waiting_ids(keys: Keys, limit: int) -> Call[list[str]]:
    """Reads the ids of the first waiting requests, of all tenants, in the order of their scores."""
    return Call("list_waiting", [limit, ""], lambda reply: ids_of(reply[2:]), keys=keys)


def delayed_ids(keys: Keys, limit: int) -> Call[list[str]]:
    """Reads the ids of delayed requests, soonest first."""
    return Call("", ["ZRANGE", keys.delayed, 0, limit - 1], ids_of)


def dead_ids(keys: Keys, limit: int) -> Call[list[str]]:
    """Reads the ids of dead letters, the latest first. Leaves out texts that are no valid ids."""

    def parse(reply: list[bytes]) -> list[str]:
        return [*filter(is_request_id, ids_of(reply))]

    return Call("", ["ZRANGE", keys.dead, 0, limit - 1, "REV"], parse, list)


def live_worker_ids(keys: Keys, now_ms: int, *, overflow: bool = False) -> Call[list[str]]:
    """Reads the ids of workers whose heartbeat is not overdue; leaves out ids that are not UTF-8.
    With `overflow`, reads only ids of overflow workers, otherwise only ids of other workers."""

    def parse(ids: list[bytes]) -> list[str]:
        texts = []
        for worker_id in ids:
            with suppress(UnicodeDecodeError):
                texts.append(worker_id.decode())
        return texts

    key = keys.overflow_workers if overflow else keys.workers
    return Call("", ["ZRANGE", key, now_ms, "+inf", "BYSCORE"], parse, list)


def is_later(time_ms: bytes | None, now_ms: int) -> bool:
    """Returns whether a field has a server time (ms) after `now_ms`; False if it has no time."""
    with suppress(ValueError):
        return time_ms is not None and int(time_ms) > now_ms
    return False


def worker_stats(keys: Keys, worker_id: str) -> Call[WorkerStats | None]:
    """Reads a worker's last report; None if the worker is gone, or if the key has no report."""

    def parse(reply: Any) -> WorkerStats | None:
        fields = text_map(reply)
        return WorkerStats.model_validate(fields) if fields else None

    return Call("", ["HGETALL", keys.worker(worker_id)], parse, lambda: None)


def note_queue(queue: str) -> Call[int]:
    """Adds the queue to the set of queue names. Gateways and clients find queues in this set."""
    return Call("", ["SADD", QUEUES, queue], int)


def forget_queue(queue: str) -> Call[int]:
    return Call("", ["SREM", QUEUES, queue], int)


def queue_names() -> Call[list[str]]:
    """Reads the names of queues, sorted. Leaves out texts that are no valid names."""
    return Call(
        "", ["SMEMBERS", QUEUES], lambda reply: sorted(filter(is_name, ids_of(reply))), list
    )


def aliases() -> Call[dict[str, str]]:
    return Call("", ["HGETALL", ALIASES], text_map, dict)


def set_alias(alias: str, model: str) -> Call[int]:
    return Call("", ["HSET", ALIASES, alias, model], int)


def forget_alias(alias: str) -> Call[int]:
    return Call("", ["HDEL", ALIASES, alias], int)


def entries_of(command: str, key: str, *args: int) -> Call[list[bytes]]:
    """Reads a key's entries by `command`. If the key has another type, logs the error and returns
    an empty list."""
    return Call("", [command, key, *args], list, list)


def shown(raw: bytes) -> str:
    """Returns the entry, shortened and escaped, for a log. Any program may have written it."""
    return repr(raw)[:100]
