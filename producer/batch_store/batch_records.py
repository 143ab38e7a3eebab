"""What is known of batches, in Redis: who made them, how far they are, who runs them."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any, Literal

import redis
import redis.asyncio
from pydantic import BaseModel

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.batch_lines import is_batch_id, new_batch_id
from promptq.producer.batch_store.files import BATCH_FILE_SECONDS
from promptq.shared.errors import PromptqError
from promptq.shared.protocol.events import Usage
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.call import ids_of, is_wrong_type

WINDOW_SECONDS = 86_400

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelled"
]
FINAL = ("failed", "completed", "expired", "cancelled")


class BatchMissingError(PromptqError):
    """There is no such batch, or it belongs to somebody else."""


class BatchOverError(PromptqError):
    """The batch has ended, or is about to, and can no longer be cancelled."""


class BatchRecord(BaseModel):
    """A batch. Times are Unix seconds. Its runner alone changes it, but for `cancelling_at`."""

    id: str
    endpoint: str
    input_file_id: str
    tenant: str = ""
    caller: ApiKey = ApiKey(name="unknown")
    """What the key allowed that made it, and so what its lines may ask for."""
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    ending: Status | None = None
    """What follows `finalizing`."""
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
        return self.status in FINAL

    @property
    def tenant_as_written(self) -> str:
        """As `Batches.turns` has it."""
        return json.dumps(self.tenant)

    def to_api(self) -> dict[str, object]:
        """OpenAI's batch object."""
        hidden = {"tenant", "caller", "ending", "output_ttl_seconds"}
        hidden |= {"total", "completed", "failed", "errors", "usage"}
        is_cancelling = self.cancelling_at is not None and not self.is_final
        return {
            **self.model_dump(exclude=hidden),
            "object": "batch",
            "status": "cancelling" if is_cancelling else self.status,
            "completion_window": "24h",
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
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.usage.total_tokens,
            },
        }


def new_batch(
    endpoint: str,
    input_file_id: str,
    caller: ApiKey,
    metadata: dict[str, str] | None = None,
    output_ttl_seconds: int = BATCH_FILE_SECONDS,
) -> BatchRecord:
    """A batch that nobody knows of yet."""
    now = int(time.time())
    return BatchRecord(
        id=new_batch_id(),
        endpoint=endpoint,
        input_file_id=input_file_id,
        tenant=caller.tenant or "",
        caller=caller,
        metadata=metadata,
        output_ttl_seconds=output_ttl_seconds,
        created_at=now,
        expires_at=now + WINDOW_SECONDS,
    )


class TooManyBatchesError(PromptqError):
    """As many batches of a tenant as it may have have not ended."""


class Batches:
    """The batches of a queue. All methods raise redis.RedisError when the server is away."""

    def __init__(self, connection: redis.asyncio.Redis, keys: Keys) -> None:
        self._redis: Any = connection
        self._keys = keys

    async def add(self, record: BatchRecord, max_unfinished: int = 0) -> None:
        """From now on the jobs know of it.

        Raises TooManyBatchesError where its tenant has so many that have not ended; 0: no limit.
        """
        if max_unfinished and await self._count_unfinished(self._redis, record) >= max_unfinished:
            raise _too_many(max_unfinished)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hset(self._keys.batch(record.id), mapping=_fields(record.model_dump()))
        pipeline.zadd(self._keys.batches_of(record.tenant), {record.id: record.created_at})
        forgotten = record.created_at - WINDOW_SECONDS - BATCH_FILE_SECONDS
        pipeline.zremrangebyscore(self._keys.batches_of(record.tenant), "-inf", forgotten)
        pipeline.sadd(self._keys.unfinished_batches, record.id)
        if max_unfinished:
            self._count_unfinished(pipeline, record)
        *_, unfinished = await pipeline.execute()
        if max_unfinished and unfinished > max_unfinished:  # others came at the same time
            pipeline = self._redis.pipeline(transaction=True)
            pipeline.srem(self._keys.unfinished_batches, record.id)
            pipeline.zrem(self._keys.batches_of(record.tenant), record.id)
            pipeline.delete(self._keys.batch(record.id))
            await pipeline.execute()
            raise _too_many(max_unfinished)

    def _count_unfinished(self, client: Any, record: BatchRecord) -> Any:
        keys = [self._keys.unfinished_batches, self._keys.batches_of(record.tenant)]
        return client.zintercard(len(keys), keys)

    async def get(self, batch_id: str, tenants: tuple[str, ...] | None = None) -> BatchRecord:
        """With tenants only if it is one of theirs. Raises BatchMissingError."""
        if is_batch_id(batch_id):  # else its key may be another one's
            record = _record(batch_id, await self._fields_of(batch_id))
            if record is not None and (tenants is None or record.tenant in tenants):
                return record
        raise BatchMissingError(f"no batch {batch_id[:80]!r} is known")

    async def _fields_of(self, batch_id: str) -> dict[bytes, bytes]:
        try:
            return _hash_of(await self._redis.hgetall(self._keys.batch(batch_id)))
        except redis.ResponseError as error:
            return _hash_of(error)

    async def page(
        self, tenants: tuple[str, ...], limit: int, after: str | None
    ) -> tuple[list[BatchRecord], bool]:
        """So many of the tenants' batches, the newest first, behind the id `after`, and whether
        there are more."""
        listed: list[str] = []
        for tenant in tenants:
            key = self._keys.batches_of(tenant)
            members = await self._redis.execute_command("ZRANGE", key, 0, -1, "REV")
            listed += [member for member in ids_of(members) if is_batch_id(member)]
        listed.sort(reverse=True)  # ids sort by time
        begin = 0
        if after is not None:
            if after not in listed:
                raise BatchMissingError(f"no batch {after[:80]!r} is known")
            begin = listed.index(after) + 1
        ids = listed[begin : begin + limit]
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id in ids:
            pipeline.hgetall(self._keys.batch(batch_id))
        hashes = map(_hash_of, await pipeline.execute(raise_on_error=False))
        records = map(_record, ids, hashes)
        return [it for it in records if it is not None], len(listed) > begin + limit

    async def cancel(self, batch_id: str, tenants: tuple[str, ...]) -> BatchRecord:
        """Ask its runner to end it. Raises BatchMissingError, BatchOverError."""
        record = await self.get(batch_id, tenants)
        if record.is_final or record.status == "finalizing":
            raise BatchOverError(f"batch {batch_id!r} is {record.status} and cannot be cancelled")
        now = int(time.time())
        await self._redis.hsetnx(self._keys.batch(batch_id), "cancelling_at", json.dumps(now))
        return await self.get(batch_id, tenants)

    async def update(self, batch_id: str, **changes: Any) -> None:
        """For its runner alone."""
        await self._redis.hset(self._keys.batch(batch_id), mapping=_fields(changes))

    async def is_cancelling(self, batch_id: str) -> bool:
        return bool(await self._redis.hexists(self._keys.batch(batch_id), "cancelling_at"))

    async def turns(self) -> tuple[Counter[str], Counter[str]]:
        """How many batches of each tenant wait for a process, and how many are run."""
        try:
            members = await self._redis.smembers(self._keys.unfinished_batches)
        except redis.ResponseError as error:
            if not is_wrong_type(error):
                raise
            members = []  # a stranger made something else of it
        ids = [batch_id for batch_id in ids_of(members) if is_batch_id(batch_id)]
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id in ids:
            pipeline.exists(self._keys.batch_runner(batch_id))
            pipeline.hget(self._keys.batch(batch_id), "tenant")
        answers = await pipeline.execute(raise_on_error=False)
        waiting: Counter[str] = Counter()
        run: Counter[str] = Counter()
        for is_run, tenant in zip(answers[::2], answers[1::2], strict=True):
            if isinstance(tenant, bytes):  # else its hash is gone, or no hash
                (run if is_run else waiting)[tenant.decode("utf-8", "replace")] += 1
        return waiting, run

    async def end(self, batch_id: str, status: Status, **changes: Any) -> None:
        """The last change; what is known is kept as long as the files."""
        key = self._keys.batch(batch_id)
        changes |= {"status": status, f"{status}_at": int(time.time())}
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hset(key, mapping=_fields(changes))
        pipeline.pexpire(key, BATCH_FILE_SECONDS * 1000)
        pipeline.srem(self._keys.unfinished_batches, batch_id)
        await pipeline.execute()

    async def forget(self, batch_id: str) -> None:
        """One whose record is gone need not be run."""
        await self._redis.srem(self._keys.unfinished_batches, batch_id)


def _too_many(limit: int) -> TooManyBatchesError:
    return TooManyBatchesError(
        f"{limit} batches of this tenant have not ended, and it may have no more; wait for one to"
        " end, or cancel one"
    )


def _fields(values: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in values.items() if value is not None}


def _hash_of(reply: Any) -> dict[bytes, bytes]:
    """The reply, empty where the key is of another type. Any other error is raised."""
    if is_wrong_type(reply):
        return {}
    if isinstance(reply, Exception):
        raise reply
    found: dict[bytes, bytes] = reply
    return found


def _record(batch_id: str, fields: dict[bytes, bytes]) -> BatchRecord | None:
    """None where there is none, or only what a stranger wrote."""
    names = [name for name in BatchRecord.model_fields if name.encode() in fields]
    try:
        values = {name: json.loads(fields[name.encode()]) for name in names}
        record = BatchRecord.model_validate(values)
    except (ValueError, RecursionError):
        return None
    return record if record.id == batch_id else None
