"""Builds the calls of the Lua scripts and reads their replies. No code here does I/O.

`RequestQueue` and `AsyncRequestQueue` use these functions, and differ in how they send a call.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pydantic import ValidationError

from promptq.shared.errors import (
    DeadlineRefusedError,
    ModelMismatchError,
    QueueFullError,
    RequestExistsError,
)
from promptq.shared.protocol.claims import Claim, ClaimContext, Claims, Held, ModelIdentity, Room
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.replies import CancelMode, CancelStatus, PriorityStatus, Reaped, Swept
from promptq.shared.protocol.request import PROTOCOL_VERSION, NewRequest
from promptq.shared.protocol.rows import Published, Row, RowStatus
from promptq.shared.protocol.worker_stats import SLOTS, SlotStats, WorkerStats
from promptq.shared.queue.call import Argument, Call, named, text_of, texts_of
from promptq.shared.queue.places import quote_of
from promptq.shared.queue.replication import nonce_of
from promptq.shared.runtime.printable import printable

_ROW_STATUSES = {status.value.encode(): status for status in RowStatus}


def _row_status(reply: bytes) -> RowStatus:
    return _ROW_STATUSES.get(reply) or RowStatus(text_of(reply).split(" ", 1)[0])


def enqueue(new: Sequence[NewRequest], idempotency_ms: int, nonce: str = "") -> Call[list[str]]:
    """Adds all requests or none. The reply has their ids. For a request with a known idempotency
    key, returns the earlier request's id.

    The `nonce` marks the call, so that it can be sent again after a lost reply. If `nonce` is
    empty, this function makes one.
    Raises RequestExistsError, QueueFullError, DeadlineRefusedError. If a request has `durability`,
    the queue waits for replicas.
    """
    is_replicated = any(item.durability is not None for item in new)
    nonce = nonce or (nonce_of(new) if is_replicated else secrets.token_hex(8))
    columns = zip(*map(_values, new), strict=True)
    used = {name: column for name, column in zip(_FIELDS, columns, strict=False) if any(column)}
    fields = ",".join(used) or "id"  # no request sets a field
    pictures = {name: url for item in new for name, url in item.pictures.items()}
    args = named(
        idempotency_ms=idempotency_ms, fields=fields, nonce=nonce, pictures=len(pictures) or ""
    )
    args += ["then", *chain.from_iterable(zip(*used.values(), strict=True))]
    args += chain.from_iterable(pictures.items())

    def parse(reply: list[Any]) -> list[str]:
        kind, *rest = texts_of(reply)
        if kind == "exists":
            raise RequestExistsError(f"id: {rest[0]!r} is taken by an earlier request")
        if kind == "full":
            retry_after_ms, setting, limit = int(rest[0]), rest[1], rest[2]
            raise QueueFullError(
                f"the queue is full: its limit {setting} is {limit}; there should be room in"
                f" {retry_after_ms} ms",
                retry_after_ms,
                setting,
            )
        if kind == "late":
            quote = quote_of(reply[3:])
            raise DeadlineRefusedError(
                f"deadline_ms: {rest[0]!r} would probably end in {quote.end_p50_ms} ms, after its"
                f" deadline in {rest[1]} ms",
                quote,
            )
        return rest

    return Call("enqueue", args, parse, is_replicated=is_replicated)


_FIELDS = (
    *("id", "payload", "priority", "deadline_ms", "delay_ms", "idempotency_key", "tenant"),
    *("account", "forked_from", "pictures", "by_deadline", "deadline_policy", "affinity"),
    "expected_tokens",
)


def _values(item: NewRequest) -> tuple[Argument, ...]:
    # an empty value or 0 means the default
    request = item.request
    return (
        *(item.request_id, item.to_payload(), request.priority, request.deadline_ms or 0),
        *(item.delay_ms, request.idempotency_key or "", request.tenant or ""),
        *(str(item.account or ""), str(item.forked_from or ""), " ".join(item.pictures)),
        *("1" if request.completion_window else "", request.deadline_policy or "", item.affinity),
        "" if request.expected_tokens is None else str(request.expected_tokens),
    )


def claim(
    worker_id: str,
    lease_ms: int,
    room: Room,
    nonce: str,
    seed_base: str,
    model: ModelIdentity,
    context: ClaimContext,
    *,
    is_overflow: bool = False,
) -> Call[Claims]:
    """Claims requests in queue order; none while the queue is paused. Raises ModelMismatchError.

    An overflow worker, which may have another model, gets only requests that the queue's other
    workers would finish too late. A request without a seed gets a seed made from `seed_base` and
    the request's id. If `seed_base` is empty, this seed is made from the request's id and the nonce
    of the call that enqueued the request.
    """
    args = named(
        worker=worker_id,
        lease_ms=lease_ms,
        max_count=room.max_count,
        token_budget=room.token_budget,
        capacity=room.capacity,
        nonce=nonce,
        version=PROTOCOL_VERSION,
        model=model.name,
        fingerprint=model.fingerprint,
        preemptible=" ".join(f"{priority}:{tokens}" for priority, tokens in room.preemptible),
        seed_base=seed_base,
        num_held=room.num_held,
        session=context.session,
        answered=context.answered,
        skip=context.skip,
        number=context.number,
        output_style=model.output_style.to_json() if model.output_style else "",
        num_sharing=room.num_sharing,
        held=" ".join(":".join(map(str, holding)) for holding in room.held),
        refused=" ".join(room.refused),
        overflow="1" if is_overflow else "",
    )

    def parse(reply: list[Any]) -> Claims:
        kind = text_of(reply[0])
        if kind == "model":
            raise ModelMismatchError(
                f"the queue is served by workers of the model {text_of(reply[1])!r:.200}"
                f" (fingerprint {printable(text_of(reply[2])[:200])}), this worker has"
                f" {model.name!r:.200} ({model.fingerprint}); a worker with another engine, other"
                " weights or other formats of them needs another queue (--queue)"
            )
        if kind == "paused":
            return Claims()
        now_ms, num_pending, next_skip, *items = reply[1:]
        claims = Claims(_parse_claim(item, int(now_ms), nth) for nth, item in enumerate(items))
        claims.num_pending, claims.next_skip = int(num_pending), int(next_skip)
        return claims

    return Call("claim", args, parse)


def has_work(fingerprint: str) -> Call[bool]:
    """Checks whether a claim by a worker with this model might change or return anything."""
    return Call("has_work", [fingerprint], lambda reply: bool(int(reply)))


def _parse_claim(item: list[Any], claimed_at_ms: int, nth: int) -> Claim:
    events: list[TokenEvent] = []
    if item[9]:
        with suppress(ValidationError):
            events.extend(TokenEvent.model_validate_json(event) for event in item[9])
    turn, tenant, weight, foreign, affinity, *_ = (*item[12:], b"", b"", b"", b"", b"")
    return Claim(
        request_id=text_of(item[0]),
        payload=item[1],
        fence=text_of(item[2]),
        attempt=int(item[3]),
        score=float(item[4]),
        seed=int(item[5]),
        enqueued_at_ms=int(item[6]),
        claimed_at_ms=claimed_at_ms,
        prompt_tokens=int(item[7]) if item[7] else None,
        cost=int(item[8]),
        events=events,
        is_spoilt=len(events) < len(item[9]),
        is_suspect=item[10] == b"1",
        num_logged=int(item[11]),
        turn=(float(turn), f"{claimed_at_ms:015} {nth:05}") if turn else None,
        tenant=text_of(tenant),
        weight=float(weight or 1),
        is_foreign=foreign == b"1",
        affinity=text_of(affinity),
    )


def publish(lease_ms: int, rows: Sequence[Row], held: Sequence[Held]) -> Call[Published]:
    """Sends the events in `rows`, and renews the leases of `held`. The reply has a
    status for each of `rows` and each of `held`."""
    args: list[str | bytes | int] = [lease_ms, len(rows)]
    for row in rows:
        args += row
    args += _held_args(held)

    def parse(reply: list[Any]) -> Published:
        row_statuses, held_statuses = reply
        return Published(
            rows=[_row_status(status) for status in row_statuses],
            held=[_row_status(status) for status in held_statuses],
        )

    return Call("publish", args, parse)


def release(
    held: Sequence[Held],
    max_crashes: int | None = None,
    delays_ms: Sequence[int] = (),
    needs: Sequence[str] = (),
) -> Call[list[str]]:
    """Puts requests back into the queue, at their old place and with their progress.

    The reply has a status for each request (see `release.lua`), such as `waiting`. If the engine
    failed, pass `max_crashes` (see `reap`): this counts a crash for each request. `delays_ms` has
    one delay for each request, during which nobody can claim the request. `needs` has one field
    name for each request, which this worker's engine cannot serve. If no live worker can serve the
    field, the request's status is `unserved`, and the worker still holds the request.
    """
    args = _held_args(held)
    if max_crashes is not None:
        args.append(max_crashes)
    elif delays_ms:
        args += ["", " ".join(map(str, delays_ms))]
    elif needs:
        args += ["needs", " ".join(needs)]
    return Call("release", args, texts_of)


def cancel(request_ids: Sequence[str], mode: CancelMode = "any") -> Call[list[CancelStatus]]:
    """Ends waiting requests. In the mode `any`, also flags running requests as cancelled.

    In the mode `flagged`, ends only waiting requests that a plain Redis client has flagged. The
    reply has a status for each request.
    """
    encoded = [request_id.encode("utf-8", "surrogateescape") for request_id in request_ids]
    return Call("cancel", [mode, *encoded], lambda reply: [*map(CancelStatus, texts_of(reply))])


def try_channels() -> Call[list[CancelStatus]]:
    """Checks that the user may publish on the queue's channels. Raises NoPermissionError."""
    return cancel([])


def reprioritise(
    request_id: str, priority: int, payload: bytes, new_payload: str
) -> Call[PriorityStatus]:
    """Moves a waiting request to a new priority if its payload is still `payload`."""
    args: list[str | bytes | int] = [request_id, priority, payload, new_payload]
    return Call("reprioritise", args, lambda reply: PriorityStatus(text_of(reply)))


def reap(max_crashes: int, limit: int = 1000) -> Call[Reaped]:
    """Ends leases that have expired, and requests whose deadline has passed.

    A request becomes a dead letter after `max_crashes` lost leases, if it ran alone when the last
    lease was lost. Old dead letters are deleted.
    """

    def parse(reply: list[int]) -> Reaped:
        returned, ended, dead, purged = (int(count) for count in reply)
        has_more = max(returned, ended, dead, purged) >= limit
        return Reaped(returned, ended, dead, purged, has_more)

    return Call("reap", [max_crashes, limit], parse)


def sweep(cursor: str = "0", limit: int = 200) -> Call[Swept]:
    """Searches one page of the server's keys, and removes requests that nothing refers to.

    `cursor` is "0" for the first page, then the cursor of the last reply. A page has about `limit`
    keys.
    """

    def parse(reply: list[Any]) -> Swept:
        return Swept(text_of(reply[0]), int(reply[1]), *texts_of(reply[2:]))

    return Call("sweep", [cursor, limit], parse)


def requeue(dead_id: str, new_id: str) -> Call[str]:
    """Enqueues a dead letter again as `new_id`. The reply is `ok`, `unknown` or `exists`."""
    return Call("requeue", [dead_id, new_id], lambda reply: text_of(reply[0]))


def purge(dead_ids: Sequence[str]) -> Call[list[str]]:
    """Deletes dead letters and everything stored for them. Replies are `purged` or `unknown`."""
    return Call("purge", list(dead_ids), texts_of)


def set_paused(keys: Keys, paused: bool) -> Call[int]:
    """Pauses or resumes the queue. A paused queue hands out no requests.

    A server with full memory refuses a pause, but not a pause's end, which frees memory.
    """
    if paused:
        return Call("", ["HSET", keys.config, "paused", 1], int)
    return Call("", ["HDEL", keys.config, "paused"], int)


def stand_by(keys: Keys, until_ms: int) -> Call[int]:
    """Records that a worker runs another model now, and will load this queue's model when it is the
    queue's turn. The record is valid until `until_ms` (Unix milliseconds of the server)."""
    return Call("", ["HSET", keys.model, "standby_until", until_ms], int, int)


def wake_workers(keys: Keys) -> Call[int]:
    """Notifies workers that there may be a request to claim."""
    return Call("", ["PUBLISH", keys.control, "pending"], int)


def drain(channel: str, worker_id: str | None) -> Call[int]:
    """Makes one worker (None: every worker) finish its running requests and exit. `channel` is the
    name of a channel to which the workers listen."""
    message = "drain" if worker_id is None else f"drain:{worker_id}"
    return Call("", ["PUBLISH", channel, message], int)


def heartbeat(
    stats: WorkerStats,
    ttl_ms: int,
    slots: Sequence[SlotStats] | None = None,
    last: WorkerStats | None = None,
) -> Call[int]:
    """Publishes a worker's statistics for `ttl_ms` milliseconds; 0 removes the worker. Returns the
    number of live workers.

    With `last`, the statistics of the last report, sends only what changed since then. Returns -1
    if the server no longer has the last report.
    """
    args: list[str | bytes | int] = [stats.worker_id, ttl_ms]
    if last is not None:
        args += ["changes", 1, "overflow", str(stats.overflow)]
    for name, value in stats:
        if name != "heartbeat_at" and (last is None or value != getattr(last, name)):
            args += [name, str(value)]
    if slots is not None:
        args += ["slots", SLOTS.dump_json([*slots])]
    return Call("heartbeat", args, int)


def hold(keys: Keys, key: str, holder: str, ttl_ms: int) -> Call[bool]:
    """Acquires or renews the lease under `key` for `ttl_ms` milliseconds; 0 releases the lease.

    Returns whether `holder` has the lease; after a release, whether `holder` had the lease.
    """
    args: list[str | bytes | int] = [key.removeprefix(keys.prefix), holder, ttl_ms]
    return Call("hold_lease", args, lambda reply: bool(int(reply)))


def _held_args(held: Iterable[Held]) -> list[str | bytes | int]:
    args: list[str | bytes | int] = []
    for item in held:
        prompt_tokens = "" if item.prompt_tokens is None else item.prompt_tokens
        args += [item.request_id, item.fence, prompt_tokens]
    return args


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit for each minute, and the `amount` that a call takes from this limit."""

    name: str
    amount: int
    limit: int


@dataclass(frozen=True, slots=True)
class RateAnswer:
    """Reply to `take_of_rates`: the state of each limit by its name."""

    wait_ms: int | None
    """Milliseconds until a new try may succeed; 0 if all amounts were taken. If it is not 0, no
    amount was taken. None if an amount exceeds its whole limit, so no try can succeed."""
    remaining: dict[str, int]
    reset_ms: dict[str, int]
    """Milliseconds until each limit is fully available again, by the limit's name."""


def take_of_rates(holder: str, rates: Sequence[Rate]) -> Call[RateAnswer]:
    """Takes the amounts from all limits of a holder, or nothing if one limit has too little."""
    args: list[str | bytes | int] = [holder]
    for rate in rates:
        args += [rate.name, rate.amount, rate.limit]

    def parse(reply: list[int]) -> RateAnswer:
        wait_ms, *rest = map(int, reply)
        names = [rate.name for rate in rates]
        return RateAnswer(
            wait_ms=None if wait_ms < 0 else wait_ms,
            remaining=dict(zip(names, rest[::2], strict=True)),
            reset_ms=dict(zip(names, rest[1::2], strict=True)),
        )

    return Call("charge_rates", args, parse)
