"""The records of batches in Redis, with owner and progress."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import from_json

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.files import BATCH_FILE_SECONDS
from promptq.producer.batch_store.input_file import is_batch_id, new_batch_id
from promptq.shared.errors import PromptqError
from promptq.shared.protocol.events import Usage
from promptq.shared.protocol.urgency import window_ms
from promptq.shared.queue.call import Call, ids_of, text_map, text_of
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.queue.spoilt import note, spoilt_record

LONGEST_WINDOW = "24h"
WINDOW_SECONDS = window_ms(LONGEST_WINDOW) // 1000

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelled"
]


class BatchMissingError(PromptqError):
    """There is no such batch, or it belongs to another tenant."""


class BatchOverError(PromptqError):
    """The batch has ended, or is about to end, and can no longer be cancelled."""


class BatchRecord(BaseModel):
    """A batch as stored in Redis. Times are Unix seconds. Only the process that runs the batch
    changes the record; any process may set `cancelling_at`."""

    id: str
    endpoint: str
    input_file_id: str
    tenant: str = ""
    caller: ApiKey = ApiKey(name="unknown")
    """The key that created the batch. Its rights limit the batch's lines."""
    queues: tuple[str, ...] = ()
    """Queues to which lines may go besides the batch's own queue; `*` stands for all queues."""
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    ending: Status | None = None
    """The final status, such as `completed`, that the batch gets after `finalizing`."""
    completion_window: str = LONGEST_WINDOW
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = Usage()
    output_ttl_seconds: int = BATCH_FILE_SECONDS
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] | None = None

    @property
    def is_final(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")

    @property
    def tenant_as_written(self) -> str:
        """The tenant as JSON text, by which `Batches.turns` counts batches."""
        return json.dumps(self.tenant)

    def to_api(self) -> dict[str, object]:
        """Returns OpenAI's batch object."""
        hidden = {"tenant", "caller", "queues", "ending", "output_ttl_seconds"}
        hidden |= {"total", "completed", "failed", "errors", "usage"}
        is_cancelling = self.cancelling_at is not None and not self.is_final
        return {
            **self.model_dump(exclude=hidden),
            "object": "batch",
            "status": "cancelling" if is_cancelling else self.status,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": {
                "input_tokens": self.usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": self.usage.cached_tokens},
                "output_tokens": self.usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.usage.reasoning_tokens or 0},
                "total_tokens": self.usage.total_tokens,
            },
        }


def new_batch(
    endpoint: str,
    input_file_id: str,
    caller: ApiKey,
    metadata: dict[str, str] | None = None,
    output_ttl_seconds: int = BATCH_FILE_SECONDS,
    queues: Sequence[str] = (),
    completion_window: str = LONGEST_WINDOW,
) -> BatchRecord:
    """Returns a new batch, which is not in Redis yet."""
    now = int(time.time())
    return BatchRecord(
        id=new_batch_id(),
        endpoint=endpoint,
        input_file_id=input_file_id,
        tenant=caller.tenant or "",
        caller=caller,
        queues=tuple(queues),
        metadata=metadata,
        output_ttl_seconds=output_ttl_seconds,
        created_at=now,
        completion_window=completion_window,
        expires_at=now + window_ms(completion_window) // 1000,
    )


class TooManyBatchesError(PromptqError):
    """A tenant has reached its limit of unfinished batches."""


class Batches:
    """The batches of a queue. All methods raise redis.RedisError if Redis is unreachable."""

    def __init__(self, queue: AsyncRequestQueue) -> None:
        self._queue = queue
        self._keys = queue.keys

    async def add(self, record: BatchRecord, max_unfinished: int = 0) -> None:
        """Adds a batch, which `promptq jobs` will run. Raises TooManyBatchesError if the tenant
        already has `max_unfinished` unfinished batches; 0: no limit."""
        own, unfinished = self._keys.batches_of(record.tenant), self._keys.unfinished_batches
        await self._reset_spoilt({own: "zset", unfinished: "set"})
        count = _command("ZINTERCARD", 2, unfinished, own)
        if 0 < max_unfinished <= await self._queue.run(count):
            raise _too_many(max_unfinished)
        forgotten = record.created_at - WINDOW_SECONDS - BATCH_FILE_SECONDS
        adding = [
            self._set(record.id, record.model_dump()),
            _command("ZADD", own, record.created_at, record.id),
            _command("ZREMRANGEBYSCORE", own, "-inf", forgotten),
            _command("SADD", unfinished, record.id),
        ]
        if not max_unfinished:
            await self._queue.run(adding, atomic=True)
            return
        *_, num_unfinished = await self._queue.run([*adding, count], atomic=True)
        if num_unfinished > max_unfinished:  # other batches came at the same time
            taking_back = [
                _command("SREM", unfinished, record.id),
                _command("ZREM", own, record.id),
                _command("DEL", self._keys.batch(record.id)),
            ]
            await self._queue.run(taking_back, atomic=True)
            raise _too_many(max_unfinished)

    async def _reset_spoilt(self, types: Mapping[str, str]) -> None:
        """Deletes and logs each key whose Redis type is not the type in `types`."""
        calls: list[Call[str]] = [Call("", ["TYPE", key], text_of) for key in types]
        for key, kind in zip(types, await self._queue.run(calls), strict=True):
            if kind not in (types[key], "none"):
                note(spoilt_record(key, f"it is of the type {kind}"))
                await self._queue.run(_command("DEL", key))

    async def get(self, batch_id: str, tenants: tuple[str, ...] | None = None) -> BatchRecord:
        """Returns a batch. With `tenants`, the batch must belong to one of these tenants. Raises
        BatchMissingError."""
        if is_batch_id(batch_id):  # another text might name another key
            record = await self._queue.run(self._read(batch_id))
            if record is not None and (tenants is None or record.tenant in tenants):
                return record
        raise BatchMissingError(f"no batch {batch_id[:80]!r} is known")

    def _read(self, batch_id: str) -> Call[BatchRecord | None]:
        read = partial(_record, batch_id)
        return Call("", ["HGETALL", self._keys.batch(batch_id)], read, lambda: None)

    async def page(
        self, tenants: tuple[str, ...], limit: int, after: str | None
    ) -> tuple[list[BatchRecord], bool]:
        """Returns up to `limit` of the tenants' batches after the id `after`, newest first, and
        whether there are more. Raises BatchMissingError if no batch has the id `after`."""
        listed: list[str] = []
        for tenant in tenants:
            key = self._keys.batches_of(tenant)
            reading: Call[list[str]] = Call("", ["ZRANGE", key, 0, -1, "REV"], ids_of, list)
            listed += filter(is_batch_id, await self._queue.run(reading))
        listed.sort(reverse=True)  # ids sort by time
        begin = 0
        if after is not None:
            if after not in listed:
                raise BatchMissingError(f"no batch {after[:80]!r} is known")
            begin = listed.index(after) + 1
        ids = listed[begin : begin + limit]
        records = await self._queue.run([self._read(batch_id) for batch_id in ids])
        return [record for record in records if record is not None], len(listed) > begin + limit

    async def cancel(self, batch_id: str, tenants: tuple[str, ...]) -> BatchRecord:
        """Requests a batch's end. Returns the record. Raises BatchMissingError, BatchOverError."""
        record = await self.get(batch_id, tenants)
        if record.is_final or record.status == "finalizing":
            raise BatchOverError(f"batch {batch_id!r} is {record.status} and cannot be cancelled")
        now, key = int(time.time()), self._keys.batch(batch_id)
        await self._queue.run(_command("HSETNX", key, "cancelling_at", json.dumps(now)))
        return await self.get(batch_id, tenants)

    async def update(self, batch_id: str, **changes: Any) -> None:
        """Changes fields of a batch. Only the process that runs the batch may call this."""
        await self._queue.run(self._set(batch_id, changes))

    async def is_cancelling(self, batch_id: str) -> bool:
        call = _command("HEXISTS", self._keys.batch(batch_id), "cancelling_at")
        return bool(await self._queue.run(call))

    async def turns(self) -> tuple[Counter[str], Counter[str]]:
        """Returns the number of waiting batches and of running batches, both by tenant."""
        key = self._keys.unfinished_batches
        members: Call[list[str]] = Call("", ["SMEMBERS", key], ids_of, list)
        calls = list[Call[Any]]()
        for batch_id in filter(is_batch_id, await self._queue.run(members)):
            calls.append(_command("EXISTS", self._keys.batch_runner(batch_id)))
            key = self._keys.batch(batch_id)
            calls.append(Call("", ["HGET", key, "tenant"], lambda reply: reply, lambda: None))
        answers = await self._queue.run(calls)
        waiting: Counter[str] = Counter()
        run: Counter[str] = Counter()
        for is_run, tenant in zip(answers[::2], answers[1::2], strict=True):
            if isinstance(tenant, bytes):  # None if there is no such hash
                (run if is_run else waiting)[tenant.decode("utf-8", "replace")] += 1
        return waiting, run

    async def end(self, batch_id: str, status: Status, **changes: Any) -> None:
        """Stores a batch's final status. The record then expires with the batch's files."""
        key = self._keys.batch(batch_id)
        changes |= {"status": status, f"{status}_at": int(time.time())}
        ending = [
            self._set(batch_id, changes),
            _command("PEXPIRE", key, BATCH_FILE_SECONDS * 1000),
            _command("SREM", self._keys.unfinished_batches, batch_id),
        ]
        await self._queue.run(ending, atomic=True)

    async def forget(self, batch_id: str) -> None:
        """Removes a batch from the set of unfinished batches. The batch's record must be final or
        gone."""
        await self._queue.run(_command("SREM", self._keys.unfinished_batches, batch_id))

    def _set(self, batch_id: str, values: dict[str, Any]) -> Call[int]:
        fields = ((name, json.dumps(value)) for name, value in values.items() if value is not None)
        return _command("HSET", self._keys.batch(batch_id), *chain.from_iterable(fields))


def _too_many(limit: int) -> TooManyBatchesError:
    return TooManyBatchesError(
        f"{limit} batches of this tenant have not ended, which is its limit; wait for one to end,"
        " or cancel one"
    )


def _command(*args: str | int) -> Call[int]:
    return Call("", list(args), int)


def _record(batch_id: str, reply: Any) -> BatchRecord | None:
    fields = text_map(reply)
    names = [name for name in BatchRecord.model_fields if name in fields]
    try:
        values = {name: from_json(fields[name], allow_inf_nan=False) for name in names}
        record = BatchRecord.model_validate(values)
    except ValueError:
        return None
    return record if record.id == batch_id else None
