"""The queue: the operations of producers and workers, built on the Lua scripts.

`RequestQueue` and `AsyncRequestQueue` have the same methods. Every change of state is one script
(see `promptq.shared.queue.scripts`), so any number of processes may use a queue.
"""

from __future__ import annotations

import asyncio
import math
import operator
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar, overload

import redis
import redis.asyncio
from redis.exceptions import NoScriptError, ResponseError

from promptq.shared.errors import QueueClosedError, RequestExistsError, RequestNotFoundError
from promptq.shared.protocol.claims import Claim, Claims, Held, ModelIdentity, Room
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.protocol.replies import CancelStatus, Reaped, Swept
from promptq.shared.protocol.request import NewRequest, RequestState
from promptq.shared.protocol.rows import Published, Row
from promptq.shared.queue import lookups, scripts
from promptq.shared.queue.call import (
    SCRIPT_NAMES,
    Call,
    Operation,
    carry_out,
    carry_out_async,
    script_text,
)
from promptq.shared.queue.claim_history import ClaimHistory, ClaimTurn
from promptq.shared.queue.replication import NOT_RUN, replicated, seconds_to_wait
from promptq.shared.server.cluster import client_at, client_of

T = TypeVar("T")

POLL_SECONDS = 1.0
"""Seconds between two polls. If a wake-up is lost, a request is delayed by at most this time."""

_SCRIPT_TRIES = 4
_ABORT_CHECK_SECONDS = 0.05
_MAX_CALLS_AT_ONCE = 32
_MAX_WAITS_AT_ONCE = 8
"""The most calls that wait for replicas at once. If a replica hangs, other calls still run."""
_CLEAR_PAGE = 500


def new_request_id() -> str:
    """Returns a UUIDv7. Later ids sort after earlier ones, so equal scores stay first-in first-out.

    The parts (RFC 9562): 48 bits of Unix milliseconds, the version, 12 bits of the millisecond's
    fraction, the variant, 62 random bits.
    """
    nanoseconds = time.time_ns()
    milliseconds, rest = divmod(nanoseconds, 1_000_000)
    fraction = rest * 4096 // 1_000_000
    value = (milliseconds & (2**48 - 1)) << 80 | 0x7 << 76 | fraction << 64
    value |= 0b10 << 62 | secrets.randbits(62)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class _Queue:
    """Base of both classes of queues: keys, worker's identity, and the code that builds calls."""

    def __init__(
        self,
        client: Any,  # redis-py's command methods are untyped
        queue: str = "default",
        *,
        worker_id: str = "",
        lease_ms: int = 10_000,
        idempotency_ms: int = 3_600_000,
        max_crashes: int = 3,
        model: ModelIdentity | None = None,
        seed: int | None = None,
        is_overflow: bool = False,
    ) -> None:
        pool = getattr(client, "connection_pool", None)  # redis-py's RedisCluster has none
        self.keys = Keys(queue, int(pool.connection_kwargs.get("db") or 0) if pool else 0)
        self.worker_id = worker_id or f"anonymous-{secrets.token_hex(4)}"
        self.lease_ms = lease_ms
        self.model = model or ModelIdentity()
        self._idempotency_ms = idempotency_ms
        self._max_crashes = max_crashes
        self._seed = seed
        self._is_overflow = is_overflow
        self._closed = False
        self._claim_history = ClaimHistory()
        self.redis = client_of(client, self.keys)
        """The client for the queue's keys."""
        register = self.redis.register_script
        where = f"KEYS.database = {self.keys.database}\n" if self.keys.database else ""
        self._scripts = {name: register(where + script_text(name)) for name in SCRIPT_NAMES}

    def _exchange(self, calls: Call[T] | Sequence[Call[T]], atomic: bool) -> Operation[T | list[T]]:
        """Implements `run`. Yields functions that call the server, and receives their results."""
        self._check_open()
        if isinstance(calls, Call):
            if calls.is_replicated:
                value: T = yield from self._replicated(calls)
                return value
            return calls.read((yield from self._reply(calls)))
        if any(call.is_replicated for call in calls):
            raise ValueError("a call that waits for replicas must be sent alone")
        places: dict[Any, list[int]] = {}
        for at, call in enumerate(calls):
            places.setdefault(self._client_for(call), []).append(at)
        if atomic and len(places) > 1:
            raise ValueError("calls about several slots of a cluster cannot be atomic")
        replies: list[Any] = [None] * len(calls)
        for client, its_places in places.items():
            its_calls = [calls[at] for at in its_places]
            its_replies = yield from self._replies(client, its_calls, atomic)
            for at, reply in zip(its_places, its_replies, strict=True):
                replies[at] = reply
        return [call.read(reply) for call, reply in zip(calls, replies, strict=True)]

    def _replies(
        self, client: Any, calls: Sequence[Call[Any]], atomic: bool
    ) -> Operation[list[Any]]:
        replies = yield from self._piped(client, calls, atomic)
        for at, reply in enumerate(replies):
            if isinstance(reply, NOT_RUN) and not atomic:
                replies[at] = yield from self._reply(calls[at])
        return replies

    def _piped(
        self, client: Any, calls: Sequence[Call[Any]], atomic: bool = False
    ) -> Operation[list[Any]]:
        pipeline = client.pipeline(transaction=atomic)
        for call in calls:
            if call.script:
                sha, keys = self._scripts[call.script].sha, call.keys or self.keys
                pipeline.execute_command("EVALSHA", sha, 1, keys.pending, *call.args)
            else:
                pipeline.execute_command(*call.args)
        replies: list[Any] = yield partial(pipeline.execute, raise_on_error=False)
        return replies

    def _replicated(self, call: Call[Any]) -> Operation[Any]:
        client = self._client_for(call)
        seconds = seconds_to_wait(client)
        return replicated(call, seconds, partial(self._piped, client), self._reply)

    def _client_for(self, call: Call[Any]) -> Any:
        return client_at(self.redis, call.key(self.keys))

    def _reply(self, call: Call[Any]) -> Operation[Any]:
        reply: Any = None
        client = self._client_for(call)
        elsewhere = {} if client is self.redis else {"client": client}
        for _ in range(_SCRIPT_TRIES):
            try:
                if not call.script:
                    return (yield partial(client.execute_command, *call.args))
                script, keys = self._scripts[call.script], call.keys or self.keys
                return (yield partial(script, keys=[keys.pending], args=call.args, **elsewhere))
            except NoScriptError as error:  # the server has started again since redis-py loaded it
                reply = error
            except ResponseError as error:
                return error
        return reply

    def _enqueue(self, new: Sequence[NewRequest]) -> Call[list[str]]:
        for item in new:
            check_request_id(item.request_id)
        return scripts.enqueue(new, self._idempotency_ms)

    def _claim(self, room: Room, turn: ClaimTurn) -> Call[Claims]:
        seed_base = "" if self._seed is None else f"seed {self._seed} "
        return scripts.claim(
            self.worker_id,
            self.lease_ms,
            room,
            turn.nonce,
            seed_base,
            self.model,
            turn.context,
            is_overflow=self._is_overflow,
        )

    def _take_one(
        self,
        take_batch: Callable[[Room], Any],
        wake_ups: Any,
        timeout: float | None,
        abort: threading.Event | asyncio.Event | None,
    ) -> Operation[Claim | None]:
        """Implements `take`, once `wake_ups` is subscribed. Yields functions that send calls."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            claims: Claims = yield partial(take_batch, Room(max_count=1, token_budget=2**53))
            if claims:
                return claims[0]
            if claims.next_skip:
                continue
            poll = time.monotonic() + POLL_SECONDS
            while time.monotonic() < poll:
                if (abort is not None and abort.is_set()) or time.monotonic() >= deadline:
                    return None
                self._check_open()
                message = yield partial(wake_ups.get_message, timeout=_ABORT_CHECK_SECONDS)
                if message is not None and message["data"] == b"pending":
                    break

    def _release(
        self, held: Sequence[Held], crashed: bool, delays_ms: Sequence[int]
    ) -> Call[list[str]]:
        return scripts.release(held, self._max_crashes if crashed else None, delays_ms)

    @property
    def has_unanswered_claim(self) -> bool:
        """Whether the last claim got no reply. Then the server may have handed out requests that
        this process does not know. The next claim returns these requests to the queue."""
        return self._claim_history.is_unanswered

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosedError(f"the queue {self.keys.queue!r} was closed")


def requeue(dead_id: str) -> Operation[str]:
    """Enqueues a dead letter again and returns the new id. Raises RequestNotFoundError."""
    new_id = new_request_id()
    reply = yield scripts.requeue(dead_id, new_id)
    if reply == "unknown":
        raise RequestNotFoundError(f"{dead_id!r} is not a dead letter")
    if reply == "exists":
        raise RequestExistsError(f"id: {new_id!r} is taken by an earlier request")
    return new_id


def _clear(keys: Keys) -> Operation[int]:
    removed = 0
    for find in (lookups.waiting_ids, lookups.delayed_ids):
        while ids := (yield find(keys, _CLEAR_PAGE)):
            statuses = yield scripts.cancel(ids, "waiting")
            removed += statuses.count(CancelStatus.CANCELLED)
    return removed


class RequestQueue(_Queue):
    """The synchronous queue. Thread-safe. `close` ends every wait."""

    def __init__(self, client: redis.Redis, queue: str = "default", **options: Any) -> None:
        super().__init__(client, queue, **options)

    @overload
    def run(self, calls: Call[T]) -> T: ...
    @overload
    def run(self, calls: Sequence[Call[T]], *, atomic: bool = False) -> list[T]: ...

    def run(self, calls: Call[T] | Sequence[Call[T]], *, atomic: bool = False) -> T | list[T]:
        """Sends one call, or several in one round trip to each server. Returns the value of each.

        If one of several calls fails, later calls still run; then `run` raises the first error. A
        script that the server has not loaded yet runs after the other calls. `atomic` means that no
        command of another client runs between the calls; only plain commands can be atomic.
        """
        return carry_out(self._exchange(calls, atomic), operator.call)

    def enqueue(self, new: Sequence[NewRequest]) -> list[str]:
        """Adds all requests or none, and returns their ids. Raises InvalidRequestError,
        RequestExistsError, QueueFullError, DeadlineRefusedError, NotReplicatedError."""
        return self.run(self._enqueue(new))

    def take_batch(self, room: Room) -> Claims:
        """Claims requests for which there is room, in queue order, without waiting.

        `room.num_held` is the number of requests that the process holds. While the process holds a
        request with `is_suspect`, it must claim nothing.
        """
        with self._claim_history.call() as turn:
            turn.claims = self.run(self._claim(room, turn))
        return turn.claims

    def take(
        self, timeout: float | None = None, abort: threading.Event | None = None
    ) -> Claim | None:
        """Claims one request, waiting up to `timeout` seconds (None: without a limit).

        Returns None if the time is over or `abort` is set. Raises QueueClosedError if the queue is
        closed during the wait. Use `take` only in a process that holds one request at a time.
        `take` reports that the process holds no other request, and may return a request with
        `is_suspect` (docs/protocol.md, Crashes). For several requests, use `take_batch`.
        """
        with self.redis.pubsub(ignore_subscribe_messages=True) as wake_ups:
            wake_ups.subscribe(self.keys.control)
            taking = self._take_one(self.take_batch, wake_ups, timeout, abort)
            return carry_out(taking, operator.call)

    def publish(self, rows: Sequence[Row], held: Sequence[Held] = ()) -> Published:
        """Sends the events in `rows` and renews the leases of `held`, in one round trip. Returns a
        status for each row and each held request."""
        return self.run(scripts.publish(self.lease_ms, rows, held))

    def release(
        self, held: Sequence[Held], *, crashed: bool = False, delays_ms: Sequence[int] = ()
    ) -> list[str]:
        """Puts requests back into the queue, at their old place and with their progress.

        Returns a status for each request; `waiting` means that the request was put back. If the
        engine failed while it ran the requests, set `crashed`, which counts a crash for each
        request. `delays_ms` has one delay for each request, during which nobody can claim the
        request.
        """
        return self.run(self._release(held, crashed, delays_ms)) if held else []

    def cancel(self, request_id: str) -> CancelStatus:
        """Cancels a request: a waiting request immediately, a running request at its next step."""
        return self.run(scripts.cancel([request_id]))[0]

    def remove(self, request_id: str) -> bool:
        """Removes a waiting request from the queue, and ends it as cancelled.

        Returns False if the request was not waiting.
        """
        statuses = self.run(scripts.cancel([request_id], "waiting"))
        return statuses[0] is CancelStatus.CANCELLED

    def clear(self) -> int:
        """Removes all waiting and delayed requests, and returns how many. Running requests stay."""
        return carry_out(_clear(self.keys), self.run)

    def contains(self, request_id: str) -> bool:
        """Returns whether the request waits in the queue."""
        return self.run(lookups.contains(self.keys, request_id))

    def count(self) -> int:
        """Returns the number of waiting requests."""
        return self.run(lookups.count(self.keys))

    def is_empty(self) -> bool:
        """Returns whether no request waits."""
        return self.count() == 0

    def state(self, request_id: str) -> RequestState | None:
        """Returns the state of a request; None if the request is unknown."""
        return self.run(lookups.state(self.keys, request_id))

    def reap(self) -> Reaped:
        """Puts dead workers' requests back into the queue. Ends requests past their deadline."""
        return self.run(scripts.reap(self._max_crashes))

    def sweep(self, cursor: str = "0") -> Swept:
        """Searches one page of the server's keys for requests that nothing refers to, and removes
        them. `cursor` is "0" for the first page, then the cursor of the last reply."""
        return self.run(scripts.sweep(cursor))

    def requeue(self, dead_id: str) -> str:
        """Enqueues a dead letter again and returns the new id. Raises RequestNotFoundError."""
        return carry_out(requeue(dead_id), self.run)

    def purge(self, dead_ids: Sequence[str]) -> int:
        """Deletes dead letters, and returns how many it deleted."""
        return self.run(scripts.purge(dead_ids)).count("purged") if dead_ids else 0

    def close(self) -> None:
        """Ends every wait and refuses further use. The Redis client stays open."""
        self._closed = True


class AsyncRequestQueue(_Queue):
    """The queue for asyncio: the methods of `RequestQueue` as coroutines.

    At most 32 calls run at once, each on a separate connection, and together they use at most half
    of the client's connections. The other half is for subscriptions. Calls beyond the limit wait.
    """

    def __init__(self, client: redis.asyncio.Redis, queue: str = "default", **options: Any) -> None:
        super().__init__(client, queue, **options)
        half = max(1, client.connection_pool.max_connections // 2)
        most = min(_MAX_CALLS_AT_ONCE, half)
        self._turns = asyncio.Semaphore(most)
        self._waits = asyncio.Semaphore(min(_MAX_WAITS_AT_ONCE, max(1, most // 2)))

    @overload
    async def run(self, calls: Call[T]) -> T: ...
    @overload
    async def run(self, calls: Sequence[Call[T]], *, atomic: bool = False) -> list[T]: ...

    async def run(self, calls: Call[T] | Sequence[Call[T]], *, atomic: bool = False) -> T | list[T]:
        waits = self._waits if isinstance(calls, Call) and calls.is_replicated else nullcontext()
        async with waits, self._turns:
            return await carry_out_async(self._exchange(calls, atomic), operator.call)

    async def enqueue(self, new: Sequence[NewRequest]) -> list[str]:
        return await self.run(self._enqueue(new))

    async def take_batch(self, room: Room) -> Claims:
        """Claims like `RequestQueue.take_batch`. A cancelled call puts the requests back."""
        claiming = asyncio.ensure_future(self._take_batch(room))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            claims = await claiming
            await self.release([claim.as_held() for claim in claims])
            raise

    async def _take_batch(self, room: Room) -> Claims:
        with self._claim_history.call() as turn:
            turn.claims = await self.run(self._claim(room, turn))
        return turn.claims

    async def take(
        self, timeout: float | None = None, abort: asyncio.Event | None = None
    ) -> Claim | None:
        async with self.redis.pubsub(ignore_subscribe_messages=True) as wake_ups:
            await wake_ups.subscribe(self.keys.control)
            taking = self._take_one(self.take_batch, wake_ups, timeout, abort)
            return await carry_out_async(taking, operator.call)

    async def publish(self, rows: Sequence[Row], held: Sequence[Held] = ()) -> Published:
        return await self.run(scripts.publish(self.lease_ms, rows, held))

    async def release(
        self, held: Sequence[Held], *, crashed: bool = False, delays_ms: Sequence[int] = ()
    ) -> list[str]:
        return await self.run(self._release(held, crashed, delays_ms)) if held else []

    async def cancel(self, request_id: str) -> CancelStatus:
        return (await self.run(scripts.cancel([request_id])))[0]

    async def remove(self, request_id: str) -> bool:
        statuses = await self.run(scripts.cancel([request_id], "waiting"))
        return statuses[0] is CancelStatus.CANCELLED

    async def clear(self) -> int:
        return await carry_out_async(_clear(self.keys), self.run)

    async def contains(self, request_id: str) -> bool:
        return await self.run(lookups.contains(self.keys, request_id))

    async def count(self) -> int:
        return await self.run(lookups.count(self.keys))

    async def is_empty(self) -> bool:
        return await self.count() == 0

    async def state(self, request_id: str) -> RequestState | None:
        return await self.run(lookups.state(self.keys, request_id))

    async def reap(self) -> Reaped:
        return await self.run(scripts.reap(self._max_crashes))

    async def sweep(self, cursor: str = "0") -> Swept:
        return await self.run(scripts.sweep(cursor))

    async def requeue(self, dead_id: str) -> str:
        return await carry_out_async(requeue(dead_id), self.run)

    async def purge(self, dead_ids: Sequence[str]) -> int:
        return (await self.run(scripts.purge(dead_ids))).count("purged") if dead_ids else 0

    async def close(self) -> None:
        self._closed = True
