"""Reads what the server holds of a queue, for the auditor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import redis

from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.server.cluster import client_of
from tests.programs.chaos.audit.auditor import Snapshot

_PAGE = 1000


def hold_names(keys: Keys) -> list[str]:
    """The sorted sets that hold ids of requests that have not ended."""
    return [keys.pending, keys.leases, keys.deadlines, keys.delayed]


def take_snapshot(
    client: redis.Redis, keys: Keys, places: Mapping[str, int | None] | None = None
) -> Snapshot:
    """Everything of the queue, key by key.

    `places` are its workers and their process ids, None for one that does not run.
    """
    snapshot, client = Snapshot(), client_of(client, keys)
    _sweep(RequestQueue(client, keys.queue))
    names = [name.decode() for name in client.scan_iter(match=f"{keys.prefix}*", count=_PAGE)]
    for start in range(0, len(names), _PAGE):
        page = names[start : start + _PAGE]
        with client.pipeline(transaction=False) as commands:
            for name in page:
                commands.pttl(name)
                if name.startswith(keys.prefix + "request:"):
                    commands.hgetall(name)
            replies = iter(commands.execute())
        for name in page:
            ttl = next(replies)
            short = name.removeprefix(keys.prefix)
            if short.startswith("request:"):
                snapshot.requests[short.removeprefix("request:")] = _request(next(replies))
            if ttl != -2:  # it went meanwhile
                snapshot.keys[short] = ttl
    by_tenant = [name for name in names if name.startswith(keys.pending + ":")]
    for name in hold_names(keys) + by_tenant:
        ids = [it.decode() for it in client.zrange(name, 0, -1)]
        snapshot.holds[name.removeprefix(keys.prefix)] = ids
    snapshot.workers = list(_workers(client, keys, places or {}))
    told = {int(worker["pid"]) for worker in snapshot.workers}
    snapshot.silent = [name for name, pid in (places or {}).items() if pid not in told]
    return snapshot


def _sweep(queue: RequestQueue) -> None:
    """Do what the upkeep does: each round forgets some ids that no worker holds any longer."""
    for _ in range(50):
        cursor = queue.sweep().cursor
        while cursor != "0":
            cursor = queue.sweep(cursor).cursor


def told_since(client: redis.Redis, keys: Keys, since_ms: int) -> set[int]:
    """The process ids of workers with a heartbeat behind this time of the server."""
    found = list(_heartbeats(client_of(client, keys), keys))
    return {int(it["pid"]) for it in found if int(it["heartbeat_at"]) > since_ms}


def find_strays(names: Iterable[str], prefixes: tuple[str, ...]) -> list[str]:
    """Names of keys that belong to no queue."""
    return sorted(name for name in names if not name.startswith(prefixes))


def _request(reply: dict[bytes, bytes]) -> dict[str, Any]:
    fields: dict[str, Any] = {key.decode(): value.decode() for key, value in reply.items()}
    for name in ("result", "history"):
        if name in fields:
            fields[name] = json.loads(fields[name])
    return fields


def _workers(
    client: redis.Redis, keys: Keys, places: Mapping[str, int | None]
) -> Iterator[dict[str, Any]]:
    """Heartbeats of those that run: who was killed a while ago is still listed."""
    pids = {str(pid) for pid in places.values()}
    return (worker for worker in _heartbeats(client, keys) if worker.get("pid") in pids)


def _heartbeats(client: redis.Redis, keys: Keys) -> Iterator[dict[str, Any]]:
    for worker_id in client.zrange(keys.workers, 0, -1):
        reply = client.hgetall(keys.worker(worker_id.decode()))
        if reply:
            yield {key.decode(): value.decode() for key, value in reply.items()}
