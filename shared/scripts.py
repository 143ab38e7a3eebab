"""Builds the calls of the Lua scripts and reads their replies; does no I/O itself.

A `Call` is what a queue sends in one round trip. The synchronous and the asynchronous queue differ
only in how they send it, so that every rule about arguments and replies stands here once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import ValidationError

from shared.errors import ModelMismatchError, QueueFullError, RequestExistsError
from shared.keys import Keys
from shared.observations import SLOTS, SlotStats
from shared.schemas import PROTOCOL_VERSION, Request, RequestState, TokenEvent, WorkerStats
from shared.tool_call_style import ToolCallStyle

T = TypeVar("T")

SCRIPT_NAMES = (
    "enqueue", "claim", "publish", "release", "cancel", "reap", "requeue", "purge", "heartbeat",
    "sweep", "waiting", "priorities", "sample", "reprioritise", "limit",
)  # fmt: skip
_SHARED_PARTS = ("_common", "_tenants", "_log", "_moves", "_crashes")
_FURTHER_PARTS = {
    "claim": ["_sharing"],
    "cancel": ["_places"],
    "reprioritise": ["_places"],
    "sweep": ["_places"],
    "priorities": ["_priorities"],
    "sample": ["_priorities"],
}


@cache
def script_text(name: str) -> str:
    """The source of one script, with what all of them share in front."""
    folder = resources.files("shared") / "lua"
    parts = [*_SHARED_PARTS, *_FURTHER_PARTS.get(name, []), name]
    return "".join((folder / f"{part}.lua").read_text() for part in parts)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One round trip: a script by name, or with `script` empty a plain command."""

    script: str
    args: list[str | bytes | int]
    parse: Callable[[Any], T]


class RowStatus(StrEnum):
    """What became of a published row or a held id; the script's header says when."""

    OK = "ok"
    DUPLICATE = "duplicate"
    GAP = "gap"
    FINISHED = "finished"
    FENCED = "fenced"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"

    @property
    def is_lost(self) -> bool:
        """Whether the request is no longer this worker's to run."""
        return self not in (RowStatus.OK, RowStatus.DUPLICATE)


_ROW_STATUSES = {status.value.encode(): status for status in RowStatus}


def _row_status(reply: bytes) -> RowStatus:
    return _ROW_STATUSES.get(reply) or RowStatus(_text(reply).split(" ", 1)[0])


class CancelStatus(StrEnum):
    CANCELLED = "cancelled"
    FLAGGED = "flagged"
    ACTIVE = "active"
    FINISHED = "finished"
    UNKNOWN = "unknown"


class PriorityStatus(StrEnum):
    """What became of a wish for another priority; the script's header says when."""

    CHANGED = "changed"
    ACTIVE = "active"
    FINISHED = "finished"
    UNKNOWN = "unknown"
    STALE = "stale"


@dataclass(slots=True)
class Claim:
    """A request as a worker got it; the fence proves this attempt in every later call."""

    request_id: str
    payload: bytes
    fence: str
    attempt: int
    score: float
    seed: int
    enqueued_at_ms: int
    claimed_at_ms: int
    prompt_tokens: int | None
    """Exact length of the prompt if an earlier attempt tokenised it."""
    cost: int
    """Expected KV need in tokens, as counted against the budget."""
    events: list[TokenEvent] = field(default_factory=list)
    """What earlier attempts emitted."""
    is_spoilt: bool = False
    """Whether the log holds something that is no event, so that nobody can go on behind it."""
    turn: tuple[float, str] | None = None
    """Where tenants share: the score whose turn it was, then the time and order of the hand-out."""
    is_suspect: bool = False
    """Whether it was aboard at crashes, so that it is to run with nothing beside it."""
    num_logged: int = 0
    """Tokens that the log holds by the id of its last entry, be it an event or not."""

    @property
    def order(self) -> tuple[float, str]:
        """Place in the queue, or in what tenants share: lowest first."""
        return self.turn or (self.score, self.request_id)

    def as_held(self) -> Held:
        """What renews its lease or gives it back."""
        return Held(self.request_id, self.fence)


class Claims(list[Claim]):
    """What one claim gave, in queue order; `num_pending` requests still wait."""

    num_pending = 0
    next_skip = 0
    """What the next call passes as `skip`, to get behind what this worker can never take."""


@dataclass(slots=True)
class Held:
    """A request that a worker holds. `prompt_tokens` is told once, when it becomes known."""

    request_id: str
    fence: str
    prompt_tokens: int | None = None


class Row(NamedTuple):
    """One event to publish, as JSON; `finish_reason` and `result_json` go with a last event.

    It brings the tokens from `start` to `end`. The fields are the script's arguments, in order.
    """

    request_id: str
    fence: str
    start: int
    end: int
    event_json: str
    finish_reason: str = ""
    result_json: str = ""

    @classmethod
    def of(cls, request_id: str, fence: str, event: TokenEvent, result_json: str = "") -> Row:
        """The row that sends `event`."""
        reason = event.finish_reason or ""
        return cls(request_id, fence, event.index, event.end, event.to_json(), reason, result_json)


@dataclass(frozen=True, slots=True)
class Published:
    """Statuses in the order of the call's rows and held ids."""

    rows: list[RowStatus]
    held: list[RowStatus]


@dataclass(frozen=True, slots=True)
class Reaped:
    returned: int
    ended: int
    dead: int


@dataclass(frozen=True, slots=True)
class Swept:
    """`cursor` is where the next call goes on, "0" if that was the last page of keys.

    `refusal` is what the server says if it does not let this user see what keys there are.
    """

    cursor: str
    num_gone: int
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker has room for.

    `capacity` is the whole worker's KV in tokens, `preemptible` the (priority, tokens) of running
    sequences, which a more urgent request may displace. `num_held` is how many requests it holds
    already: a suspect of earlier crashes goes only to a worker that holds none.
    """

    max_count: int
    token_budget: int
    capacity: int = 2**53
    preemptible: Sequence[tuple[int, int]] = ()
    num_held: int = 0


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model that workers of a queue must agree on; empty: any."""

    name: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class NewRequest:
    request_id: str
    request: Request
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class ClaimContext:
    """Which calls went before (`shared.claim_history`), so that the server notices a lost reply."""

    session: str = ""
    answered: str = ""
    skip: int = 0
    number: int = 0


def enqueue(new: Iterable[NewRequest], idempotency_ms: int, nonce: str = "") -> Call[list[str]]:
    """All requests or none. Gives the ids, an older one where the idempotency key is known.

    With a `nonce`, new for each call, the call may be sent again when its reply was lost.
    Raises RequestExistsError, QueueFullError.
    """
    args: list[str | bytes | int] = [f"{idempotency_ms} 7"]
    for item in new:
        request = item.request
        args += [item.request_id, request.to_payload(), request.priority]
        args += [request.deadline_ms or 0, item.delay_ms, request.idempotency_key or ""]
        args.append(request.tenant or "")
    if nonce:
        args.append(nonce)

    def parse(reply: list[Any]) -> list[str]:
        kind, *rest = _texts(reply)
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
        return rest

    return Call("enqueue", args, parse)


def claim(
    worker_id: str,
    lease_ms: int,
    room: Room,
    nonce: str,
    seed_base: str,
    model: ModelIdentity,
    context: ClaimContext = ClaimContext(),
) -> Call[Claims]:
    """Take requests in queue order; none while the queue is paused. Raises ModelMismatchError."""
    preemptible = " ".join(f"{priority}:{tokens}" for priority, tokens in room.preemptible)
    args: list[str | bytes | int] = [worker_id, lease_ms, room.max_count, room.token_budget]
    args += [room.capacity, nonce, PROTOCOL_VERSION, model.name, model.fingerprint, preemptible]
    args += [seed_base, room.num_held, context.session, context.answered, context.skip]
    args.append(context.number)

    def parse(reply: list[Any]) -> Claims:
        kind = _text(reply[0])
        if kind == "model":
            raise ModelMismatchError(
                f"the queue is served by workers of the model {_text(reply[1])!r} (fingerprint"
                f" {_text(reply[2])}), this worker has {model.name!r} ({model.fingerprint})"
            )
        if kind == "paused":
            return Claims()
        now_ms, num_pending, next_skip, *items = reply[1:]
        claims = Claims(_parse_claim(item, int(now_ms), nth) for nth, item in enumerate(items))
        claims.num_pending, claims.next_skip = int(num_pending), int(next_skip)
        return claims

    return Call("claim", args, parse)


def _parse_claim(item: list[Any], claimed_at_ms: int, nth: int) -> Claim:
    events: list[TokenEvent] = []
    with suppress(ValidationError):
        events.extend(TokenEvent.model_validate_json(event) for event in item[9])
    return Claim(
        request_id=_text(item[0]),
        payload=item[1],
        fence=_text(item[2]),
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
        turn=(float(item[12]), f"{claimed_at_ms:015} {nth:05}") if len(item) > 12 else None,
    )


def publish(lease_ms: int, rows: Sequence[Row], held: Sequence[Held]) -> Call[Published]:
    """Send a step's events and renew the leases of `held`."""
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


def release(held: Sequence[Held], max_crashes: int | None = None) -> Call[list[str]]:
    """Give requests back to the queue, at their old place and with their progress.

    With `max_crashes` (see `reap`) because the engine failed: a crash of each.
    """
    args = _held_args(held)
    if max_crashes is not None:
        args.append(max_crashes)
    return Call("release", args, _texts)


CancelMode = Literal["any", "waiting", "flagged"]


def cancel(request_ids: Sequence[str], mode: CancelMode = "any") -> Call[list[CancelStatus]]:
    """End what waits, and in the mode `any` flag what runs.

    `flagged` ends only what a plain client has flagged.
    """

    def parse(reply: list[Any]) -> list[CancelStatus]:
        return [CancelStatus(text) for text in _texts(reply)]

    encoded = [request_id.encode("utf-8", "surrogateescape") for request_id in request_ids]
    return Call("cancel", [mode, *encoded], parse)


def reprioritise(
    request_id: str, priority: int, payload: bytes, new_payload: str
) -> Call[PriorityStatus]:
    """Move what waits to another priority, if `payload` is still what it was enqueued with."""
    args: list[str | bytes | int] = [request_id, priority, payload, new_payload]
    return Call("reprioritise", args, lambda reply: PriorityStatus(_text(reply)))


def reap(max_crashes: int, limit: int = 1000) -> Call[Reaped]:
    """Tidy up behind workers and requests whose time is over.

    A request that was aboard at `max_crashes` lost leases, at the last of them alone, is buried.
    """

    def parse(reply: list[int]) -> Reaped:
        return Reaped(*(int(count) for count in reply))

    return Call("reap", [max_crashes, limit], parse)


def sweep(cursor: str = "0", limit: int = 200) -> Call[Swept]:
    """Look at a page of the server's keys, and let go of what nothing has referred to for long."""

    def parse(reply: list[Any]) -> Swept:
        return Swept(_text(reply[0]), int(reply[1]), *_texts(reply[2:]))

    return Call("sweep", [cursor, limit], parse)


def requeue(dead_id: str, new_id: str) -> Call[str]:
    """Run a dead letter again as `new_id`; replies ok, unknown or exists."""

    def parse(reply: list[Any]) -> str:
        return _text(reply[0])

    return Call("requeue", [dead_id, new_id], parse)


def purge(dead_ids: Sequence[str]) -> Call[list[str]]:
    """Delete dead letters and all that is kept of them; replies purged or unknown for each."""
    return Call("purge", list(dead_ids), _texts)


def dead_ids(keys: Keys, limit: int) -> Call[list[str]]:
    """Ids of dead letters, the latest first."""
    return Call("", ["ZRANGE", keys.dead, 0, limit - 1, "REV"], _ids)


def set_paused(keys: Keys, paused: bool) -> Call[int]:
    """Whether the queue hands out requests."""
    return Call("", ["HSET", keys.config, "paused", int(paused)], int)


def tell_tool_call_style(keys: Keys, style: ToolCallStyle) -> Call[int]:
    """Say how the queue's model writes the call of a tool."""
    return Call("", ["HSET", keys.config, "tool_call_style", style.to_json()], int)


def tell_workers(keys: Keys, message: str) -> Call[int]:
    """Send a message on the control channel."""
    return Call("", ["PUBLISH", keys.control, message], int)


@dataclass(frozen=True, slots=True)
class Rate:
    """What is to be taken of a rate: `amount` of `limit` a minute."""

    name: str
    amount: int
    limit: int


@dataclass(frozen=True, slots=True)
class RateAnswer:
    """Whether all was taken, and how each rate stands, by its name."""

    wait_ms: int | None
    """0: all was taken. Else nothing was; None: it is more than a minute's, so it never will be."""
    remaining: dict[str, int]
    reset_ms: dict[str, int]
    """Until all of it is back."""


def take_of_rates(holder: str, rates: Sequence[Rate]) -> Call[RateAnswer]:
    """Take from all of a holder's rates or from none."""
    args: list[str | bytes | int] = [holder]
    for rate in rates:
        args += [rate.name, rate.amount, rate.limit]

    def parse(reply: list[int]) -> RateAnswer:
        wait_ms, *rest = (int(it) for it in reply)
        names = [rate.name for rate in rates]
        return RateAnswer(
            wait_ms=None if wait_ms < 0 else wait_ms,
            remaining=dict(zip(names, rest[::2], strict=True)),
            reset_ms=dict(zip(names, rest[1::2], strict=True)),
        )

    return Call("limit", args, parse)


def heartbeat(
    stats: WorkerStats, ttl_ms: int, slots: Sequence[SlotStats] | None = None
) -> Call[int]:
    """Tell how a worker fares, for `ttl_ms`; 0: that it leaves. Gives how many workers live."""
    args: list[str | bytes | int] = [stats.worker_id, ttl_ms]
    for name, value in stats.model_dump(exclude={"heartbeat_at"}).items():
        args += [name, str(value)]
    if slots is not None:
        args += ["slots", SLOTS.dump_json([*slots])]
    return Call("heartbeat", args, int)


def server_time_ms() -> Call[int]:
    """The server's clock, in Unix milliseconds."""
    return Call("", ["TIME"], lambda reply: int(reply[0]) * 1000 + int(reply[1]) // 1000)


def live_worker_ids(keys: Keys, now_ms: int) -> Call[list[str]]:
    """Workers whose heartbeat is not overdue."""
    return Call("", ["ZRANGE", keys.workers, now_ms, "+inf", "BYSCORE"], _texts)


def worker_stats(keys: Keys, worker_id: str) -> Call[WorkerStats | None]:
    """What a worker last told of itself; None if it is gone."""

    def parse(reply: Any) -> WorkerStats | None:
        fields = text_map(reply)
        return WorkerStats.model_validate(fields) if fields else None

    return Call("", ["HGETALL", keys.worker(worker_id)], parse)


def waiting_ids(keys: Keys, limit: int) -> Call[list[str]]:
    """Ids at the front of the queue, those of all tenants by their score."""
    return Call("waiting", [limit, ""], lambda reply: _ids(reply[2:]))


def delayed_ids(keys: Keys, limit: int) -> Call[list[str]]:
    """Ids that wait for their time, soonest first."""
    return Call("", ["ZRANGE", keys.delayed, 0, limit - 1], _ids)


def count(keys: Keys) -> Call[int]:
    """How many requests of all tenants wait, not counting delayed ones."""
    return Call("waiting", [0, ""], lambda reply: int(reply[0]))


def contains(keys: Keys, request_id: str) -> Call[bool]:
    """Whether the request waits in the queue."""
    return Call("waiting", [0, request_id], lambda reply: bool(reply[1]))


def record(keys: Keys, request_id: str) -> Call[dict[str, str]]:
    """A request's hash as it is, all fields as text; empty if there is none."""
    return Call("", ["HGETALL", keys.request(request_id)], text_map)


def payload(keys: Keys, request_id: str) -> Call[bytes | None]:
    """A request's payload as it was enqueued; None if it is unknown."""
    return Call("", ["HGET", keys.request(request_id), "payload"], lambda reply: reply)


def state(keys: Keys, request_id: str) -> Call[RequestState | None]:
    """The state of a request; None if it is unknown. Plain clients leave it out: waiting."""

    def parse(reply: list[Any]) -> RequestState | None:
        current, payload = reply
        if current is not None:
            with suppress(ValueError):  # a stranger's word means nothing to the scripts either
                return RequestState(_text(current))
        return RequestState.WAITING if payload is not None else None

    return Call("", ["HMGET", keys.request(request_id), "state", "payload"], parse)


def log_after(keys: Keys, request_id: str, position: int) -> Call[list[bytes]]:
    """Events of the replay log that end behind `position` tokens, and the last event."""

    def parse(reply: list[Any]) -> list[bytes]:
        return [fields[b"event"] if isinstance(fields, dict) else fields[1] for _, fields in reply]

    # The entry `position-0` was seen; `position-1` would be the last event, which may add nothing.
    return Call("", ["XRANGE", keys.tokens(request_id), f"({position}-0", "+"], parse)


def _held_args(held: Iterable[Held]) -> list[str | bytes | int]:
    args: list[str | bytes | int] = []
    for item in held:
        prompt_tokens = "" if item.prompt_tokens is None else item.prompt_tokens
        args += [item.request_id, item.fence, prompt_tokens]
    return args


def _text(value: str | bytes | int) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _texts(values: Iterable[Any]) -> list[str]:
    return [_text(value) for value in values]


def _ids(values: Iterable[bytes]) -> list[str]:
    """Ids as a stranger may have put them in: bytes that are no text come as surrogates."""
    return [value.decode("utf-8", "surrogateescape") for value in values]


def text_map(reply: Any) -> dict[str, str]:
    """A hash as text, whichever protocol it came by."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {_text(name): value.decode("utf-8", "replace") for name, value in pairs}
