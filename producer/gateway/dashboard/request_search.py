"""Finds requests by state, tenant and the beginning of their id.

Waiting requests, running requests and dead letters are in the queue's sorted sets, which are read
page by page. No set contains ended requests, so SCAN finds these among all keys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from redis.exceptions import NoPermissionError

from promptq.producer.calls.call_body import check_one_of, wrong_field
from promptq.shared.protocol.keys import is_name
from promptq.shared.protocol.request import RequestState
from promptq.shared.queue.call import Call, ids_of
from promptq.shared.queue.request_queue import AsyncRequestQueue

PAGE = 50
SCAN_COUNT = 500
MAX_SCANS = 20
"""The most calls of SCAN for one page. They cover about 10,000 keys."""

SETS = ("waiting", "delayed", "active", "dead")
"""The states whose requests are in a sorted set."""
STATES = ("", *SETS, *(state.value for state in RequestState if state.value not in SETS))

_WHOLE = re.compile(r"-?\d{1,15}")


class FoundRequest(BaseModel):
    """A found request. Times are Unix milliseconds of the server; None if the event has not
    happened."""

    request_id: str
    state: str
    """The request's state; `delayed` if it waits and is not due yet."""
    tenant: str = ""
    priority: int = 0
    attempt: int = 0
    worker: str = ""
    enqueued_at: int | None = None
    claimed_at: int | None = None
    first_token_at: int | None = None
    finished_at: int | None = None
    finish_reason: str = ""
    prompt_tokens: int | None = None


_FIELDS = [name for name in FoundRequest.model_fields if name != "request_id"]


class FoundRequests(BaseModel):
    """A page of requests. Pass `cursor` to `search` for the next page; None on the last page."""

    requests: list[FoundRequest]
    searched: str
    """Which requests were searched, in words."""
    cursor: str | None


async def search(
    queue: AsyncRequestQueue,
    *,
    state: str = "",
    tenant: str = "",
    prefix: str = "",
    cursor: str = "",
) -> FoundRequests:
    """Returns a page of the requests with this state and tenant, whose id begins with `prefix`. An
    empty filter matches all requests. Raises InvalidRequestError and errors of redis-py."""
    check_one_of("state", state, STATES)
    if cursor and (re.fullmatch(r"[0-9]{1,20}", cursor) is None or int(cursor) >= 2**64):
        raise wrong_field(
            "cursor", f"{cursor!r} is not the cursor of a page; the first page needs none"
        )
    requests = _Search(queue, state, tenant, prefix)
    if state in SETS and not prefix:
        return await requests.in_sets(int(cursor or 0))
    try:
        return await requests.in_keys(int(cursor or 0))
    except NoPermissionError:
        return FoundRequests(
            requests=await requests.with_this_id(),
            searched="only this exact id, since this gateway's Redis user may not SCAN",
            cursor=None,
        )


class _Search:
    def __init__(self, queue: AsyncRequestQueue, state: str, tenant: str, prefix: str) -> None:
        self._queue, self._keys = queue, queue.keys
        self._state, self._tenant, self._prefix = state, tenant, prefix

    async def in_sets(self, start: int) -> FoundRequests:
        """Returns the page that begins at a position of the state's sorted set. Waiting requests
        are in one set for each tenant. Without a tenant, reads these sets one after the other."""
        names = await self._set_names()
        sizes = await self._queue.run([Call("", ["ZCARD", name], int, int) for name in names])
        total, at, left = sum(sizes), start, PAGE
        pages: list[Call[list[bytes]]] = []
        latest_first: list[str | bytes | int] = ["REV"] if self._state == "dead" else []
        for name, size in zip(names, sizes, strict=True):
            if at < size and left > 0:
                command: list[str | bytes | int] = ["ZRANGE", name, at, at + left - 1]
                pages.append(Call("", command + latest_first, list, list))
                left -= min(left, size - at)
            at = max(0, at - size)
        ids = [request_id for page in await self._queue.run(pages) for request_id in page]
        rows = await self._rows(ids)
        upto = start + len(ids)
        # Pages of other states are filtered by tenant, because their sets have all tenants.
        is_own = self._tenant and self._state == "waiting"
        whose = f" of tenant {self._tenant}" if is_own else ""
        kinds = {
            "waiting": "waiting requests",
            "active": "running requests",
            "dead": "dead letters",
        }
        return FoundRequests(
            requests=rows if self._state == "waiting" else self._of_tenant(rows),
            searched=(f"{start + 1:,} to {upto:,} of " if ids else "")
            + f"{total:,} {kinds.get(self._state, 'delayed requests')}{whose}",
            cursor=str(upto) if ids and upto < total else None,
        )

    async def in_keys(self, position: int) -> FoundRequests:
        """Returns matches among the server's keys after a position (cursor) of SCAN."""
        is_first = position == 0
        rows = await self.with_this_id() if self._prefix and is_first else []
        seen = {self._keys.request(row.request_id).encode() for row in rows}
        looked_at, pattern = 0, self._pattern()
        start = len(self._keys.request(""))
        for _ in range(MAX_SCANS):
            position, keys = await self._queue.run(_scan(position, pattern))
            looked_at += SCAN_COUNT
            fresh = set(keys) - seen  # SCAN may return a key twice
            seen |= fresh
            rows += self._matching(await self._rows([name[start:] for name in fresh]))
            if position == 0 or len(rows) >= PAGE:
                break
        size = await self._queue.run(Call("", ["DBSIZE"], int))
        rows.sort(key=lambda row: row.enqueued_at or 0, reverse=True)
        part = "all" if is_first else "the rest of"
        if position:
            part = f"about {looked_at:,}{'' if is_first else ' more'} of"
        return FoundRequests(
            requests=rows,
            searched=f"{part} {size:,} keys of the server, in no order",
            cursor=str(position) if position else None,
        )

    async def with_this_id(self) -> list[FoundRequest]:
        """Returns a list with the request whose id equals the prefix, if this request exists and
        matches."""
        return self._matching(await self._rows([self._prefix.encode()]))

    async def _set_names(self) -> list[str]:
        if self._state != "waiting":
            by_state = {"delayed": self._keys.delayed, "active": self._keys.leases}
            return [by_state.get(self._state, self._keys.dead)]
        if self._tenant:
            return [self._keys.pending_of(self._tenant)]
        reading = ["SMEMBERS", self._keys.tenants_waiting]
        tenants: list[str] = await self._queue.run(Call("", reading, ids_of, list))
        names = sorted(filter(is_name, tenants))
        return [self._keys.pending, *map(self._keys.pending_of, names)]

    def _pattern(self) -> str:
        """Returns the pattern for SCAN. Wildcards in the prefix are escaped."""
        return re.sub(r"([*?\[\]\\^])", r"\\\1", self._keys.request(self._prefix)) + "*"

    def _of_tenant(self, rows: list[FoundRequest]) -> list[FoundRequest]:
        return [row for row in rows if not self._tenant or row.tenant == self._tenant]

    def _matching(self, rows: list[FoundRequest]) -> list[FoundRequest]:
        return [row for row in self._of_tenant(rows) if self._state in ("", row.state)]

    async def _rows(self, ids: Sequence[bytes]) -> list[FoundRequest]:
        names = [name.decode("utf-8", "replace") for name in ids]
        calls: list[Call[Any]] = []
        for name in names:
            key = self._keys.request(name)
            calls.append(Call("", ["HMGET", key, *_FIELDS], list, list))
            # Payloads are not read, because there may be hundreds, each of megabytes.
            calls.append(Call("", ["HEXISTS", key, "payload"], bool, bool))
            is_delayed = ["ZSCORE", self._keys.delayed, name]
            calls.append(Call("", is_delayed, lambda score: score is not None, bool))
        replies = iter(await self._queue.run(calls))
        return [
            _row(name, values, is_delayed=is_delayed)
            for name, values, is_known, is_delayed in zip(
                names, replies, replies, replies, strict=True
            )
            if is_known
        ]


def _scan(position: int, pattern: str) -> Call[tuple[int, list[bytes]]]:
    return Call(
        "",
        ["SCAN", position, "MATCH", pattern, "COUNT", SCAN_COUNT, "TYPE", "hash"],
        lambda reply: (int(reply[0]), reply[1]),
    )


def _row(request_id: str, values: list[bytes | None], *, is_delayed: bool) -> FoundRequest:
    fields: dict[str, Any] = {"state": "waiting"}
    for name, value in zip(_FIELDS, values, strict=True):
        text = "" if value is None else value.decode("utf-8", "replace")
        if value is not None and FoundRequest.model_fields[name].annotation is str:
            fields[name] = text
        elif _WHOLE.fullmatch(text):
            fields[name] = int(text)
    if is_delayed and fields["state"] == "waiting":
        fields["state"] = "delayed"
    return FoundRequest(request_id=request_id, **fields)
