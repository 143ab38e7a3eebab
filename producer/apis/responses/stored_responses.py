"""Reads and writes records of responses in Redis, under the keys of the gateway's own queue.

A record does not have the response's state. Only the queue that serves the response's request has
this state. Records expire by themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json

from promptq.producer.apis.responses.ended_output import EndedOutput
from promptq.producer.apis.responses.input_items import id_of
from promptq.producer.apis.responses.response_call import (
    NewResponse,
    ResponseCall,
    is_response_id,
    not_known,
)
from promptq.producer.calls.errors import NOT_AGAIN, ApiError
from promptq.shared.queue.call import Call, ids_of, named, texts_of
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.turns import Turns

_OVERHEAD_BYTES = 500
"""Approximate memory of a record in Redis, in bytes, besides the values of its fields."""
_FIELDS = ("tenant", "queue", "call", "echo", "result")
_CALLS = TypeAdapter(ResponseCall)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response's record. `queue` is the name of the queue that serves the response's request.
    `result` is the response's output (`EndedOutput`) as JSON; None until the output is stored."""

    call: ResponseCall
    tenant: str
    queue: str
    result: bytes | None = None


class StoredResponses:
    """The records of responses. All methods raise redis.RedisError if Redis is unreachable."""

    def __init__(
        self, queue: AsyncRequestQueue, turns: Turns, *, seconds: int, most: int, most_bytes: int
    ) -> None:
        """Records expire after `seconds`. A tenant may have `most` records and `most_bytes`; 0: no
        limit."""
        self._queue = queue
        self._keys = queue.keys
        self.turns = turns
        """Runs work on large outputs in slices, so that other tasks run in between."""
        self._limits = (seconds * 1000, most, most_bytes)

    async def add(self, new: NewResponse, tenant: str, queue: str) -> None:
        """Stores a new response. Raises ApiError 413 if the tenant would exceed a limit."""
        call = new.call
        options = asdict(call)
        del options["id"], options["echo"]
        fields: dict[str, str | bytes] = {
            "tenant": tenant,
            "queue": queue,
            "call": json.dumps(options),
            "echo": call.echo,
            "input": new.input_lines,
        }
        reply = await self._run("add", tenant, call.id, fields)
        if reply[0] == "full":
            raise self._full(tenant, reply[1], int(reply[2]))

    async def end(self, stored: StoredResponse, output: EndedOutput) -> None:
        """Stores the output, unless the record already has an output or was deleted."""
        result = await self.turns.run(output.to_json())
        await self._run("end", stored.tenant, stored.call.id, {"result": result})

    async def forget(self, response_id: str, tenant: str) -> None:
        """Deletes a record, if it exists."""
        await self._run("forget", tenant, response_id, {})

    async def get(self, response_id: str, tenants: Sequence[str] | None = None) -> StoredResponse:
        """Returns a record. Raises RequestNotFoundError if no tenant in `tenants` (None: any
        tenant) has such a record."""
        if is_response_id(response_id):  # otherwise it might name another key
            record = await self._queue.run(self._read(response_id))
            if record is not None and (tenants is None or record.tenant in tenants):
                return record
        raise not_known(response_id)

    async def input_lines(self, stored: StoredResponse) -> list[bytes]:
        """Returns the items of a response's own input, each as JSON."""
        key = self._keys.response(stored.call.id)
        return await self._queue.run(Call("", ["HGET", key, "input"], _lines))

    async def unfinished(self, not_since_ms: int, limit: int) -> list[StoredResponse]:
        """Returns up to `limit` responses whose output is not stored. Leaves out responses that a
        gateway has checked in the last `not_since_ms` milliseconds. Marks the returned ones as
        checked now.

        The `call` of these responses has only the id, because the rest may be megabytes.
        """
        now = int(time.time() * 1000)
        key = self._keys.unfinished_responses
        due: list[str | int] = ["ZRANGE", key, "-inf", now - not_since_ms, "BYSCORE"]
        listing: Call[list[str]] = Call("", [*due, "LIMIT", 0, limit], ids_of, list)
        ids = [each for each in await self._queue.run(listing) if is_response_id(each)]
        if not ids:
            return []
        keys = [self._keys.response(response_id) for response_id in ids]
        reading: list[Call[Any]] = [
            Call("", ["HMGET", key, "tenant", "queue"], _place, lambda: None) for key in keys
        ]
        reading += [Call("", ["HEXISTS", key, "result"], bool, lambda: True) for key in keys]
        replies = await self._queue.run(reading)
        unfinished = [
            StoredResponse(ResponseCall(response_id, model="", echo=""), *place)
            for response_id, place, is_over in zip(
                ids, replies[: len(ids)], replies[len(ids) :], strict=True
            )
            if place is not None and not is_over
        ]
        gone = {*ids} - {record.call.id for record in unfinished}
        calls: list[Call[Any]] = [
            Call("", ["ZADD", key, "XX", now, record.call.id], int) for record in unfinished
        ]
        calls += [Call("", ["ZREM", key, response_id], int) for response_id in gone]
        await self._queue.run(calls)
        return unfinished

    async def _run(
        self, what: str, tenant: str, response_id: str, fields: Mapping[str, str | bytes]
    ) -> list[str]:
        num_bytes = sum(len(value) for value in fields.values())
        if what == "add":
            num_bytes += _OVERHEAD_BYTES
        ttl_ms, most, most_bytes = self._limits
        args = named(
            what=what,
            tenant=tenant,
            id=response_id,
            added=num_bytes,
            ttl_ms=ttl_ms,
            most=most,
            most_bytes=most_bytes,
        )
        args += ["then", *chain.from_iterable(fields.items())]
        return await self._queue.run(Call("store_response", args, texts_of))

    def _read(self, response_id: str) -> Call[StoredResponse | None]:
        read = partial(_record, response_id)
        return Call("", ["HMGET", self._keys.response(response_id), *_FIELDS], read, lambda: None)

    def _full(self, tenant: str, what: str, kept: int) -> ApiError:
        _, most, most_bytes = self._limits
        whose = f"the tenant {tenant!r}" if tenant else "the tenant without a name"
        usage = f"{kept} stored responses, and may have {most}"
        if what == "bytes":
            usage = f"{kept} bytes of stored responses, and may have {most_bytes}"
        return ApiError(
            413,
            f"store: {whose} has {usage}; delete some, or send store: false",
            param="store",
            code="response_quota_exceeded",
            headers=NOT_AGAIN,
        )


def _place(reply: list[bytes | None]) -> tuple[str, str] | None:
    tenant, queue = reply
    return None if tenant is None or queue is None else (tenant.decode(), queue.decode())


def _lines(reply: bytes | None) -> list[bytes]:
    # Any program may have written the record, so this checks ids and UTF-8.
    lines = (reply or b"").split(b"\n")
    for line in lines:
        id_of(line).decode()
        line.decode()
    return lines


def _record(response_id: str, reply: Any) -> StoredResponse | None:
    if None in reply[:-1]:
        return None
    tenant, queue, options, echo = (field.decode() for field in reply[:-1])
    call = _CALLS.validate_python(
        {**from_json(options, allow_inf_nan=False), "id": response_id, "echo": echo}
    )
    _ = call.expected  # raises an error for a field that is not valid
    return StoredResponse(call, tenant, queue, reply[-1])
