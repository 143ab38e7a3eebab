"""Reads recorded calls as moves of the explorer, so that its invariants can check a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from promptq.shared.protocol.claims import ClaimContext, Held, ModelIdentity, Room
from promptq.shared.protocol.rows import Row
from promptq.shared.queue import scripts
from promptq.shared.queue.call import Call
from tests.programs.states.calls import FORGOTTEN, Move
from tests.programs.states.world import Spec, View
from tests.programs.traces.trace_file import Entry

LEVEL_MS = 60_000
"""Milliseconds by which a level of priority moves a request, for the explorer's invariants."""
_NUM_ROW, _NUM_HELD = len(Row._fields), 3


@dataclass(frozen=True)
class RecordedSpec(Spec):
    """A request of a trace. Its tokens are the tokens of the first accepted rows."""

    tokens: list[int] = field(default_factory=list)

    def token(self, index: int) -> int:
        return self.tokens[index] if index < len(self.tokens) else -1


def spec_of(
    request_id: str,
    payload: str,
    arrived_ms: int | None,
    score: float,
    aging_ms: int = LEVEL_MS,
    most_moved_ms: float = 0,
) -> RecordedSpec:
    """Returns the request that has this payload. If `arrived_ms` is None, `score` is the request's
    place in the queue.

    The expected output may move a request by `most_moved_ms`. The result has the arrival time that
    leads to the request's place if a level of priority counts `LEVEL_MS`.
    """
    fields = json.loads(payload)
    priority = int(fields.get("priority") or 0)
    place = round(score)
    if arrived_ms is not None and abs(place - arrived_ms - priority * aging_ms) > most_moved_ms:
        place = arrived_ms + priority * aging_ms
    return RecordedSpec(
        request_id,
        first_token=0,
        num_tokens=int(fields.get("max_tokens") or 2**31),
        priority=priority,
        tenant=fields.get("tenant"),
        plain=arrived_ms is None,
        idempotency_key=fields.get("idempotency_key"),
        arrived_ms=place - priority * LEVEL_MS,
    )


def move_of(entry: Entry, before: View) -> Move:
    """Returns the move that a call makes in this state. Raises ValueError if no worker or client
    sends such a call."""
    match entry.script:
        case "publish":
            return _publish(entry, before)
        case "release":
            return _release(entry, before)
        case "claim":
            return _claim(entry)
        case "enqueue":
            parse = scripts.enqueue([], 0).parse  # an empty call has the parser of every other one
            return Move("produce", entry.name, (_call(entry, parse),), tuple(payloads_of(entry)))
        case "cancel":
            mode, *ids = entry.args
            call = scripts.cancel(ids, mode)  # type: ignore[arg-type] # any text
            return Move("cancel", entry.name, (call,), tuple(ids))
        case "reap":
            call = scripts.reap(*map(int, entry.args))
            return Move("reap", entry.name, (call,), ())
        case "sweep":
            # The invariant is about a sweep of all keys, in one page.
            is_whole = entry.args[0] == "0" and entry.reply[0] == "0"
            parse = scripts.sweep().parse
            return Move("sweep" if is_whole else "page", entry.name, (_call(entry, parse),), ())
        case "requeue":
            call = scripts.requeue(*entry.args)
            return Move("requeue", entry.name, (call,), entry.args)
        case "purge":
            kind = "purge" if len(entry.args) == 1 else "purges"
            return Move(kind, entry.name, (scripts.purge(entry.args),), entry.args)
        case "reprioritise":
            request_id, priority, read, written = entry.args
            call = scripts.reprioritise(
                request_id, int(priority), read.encode("utf-8", "surrogateescape"), written
            )
            return Move("priority", entry.name, (call,), (request_id,))
        case _:
            return Move("other", entry.name, (_call(entry, lambda reply: reply),), ())


def payloads_of(entry: Entry) -> dict[str, str]:
    """Returns the payloads that a call enqueues, by their ids."""
    if entry.script != "enqueue":
        return {}
    named, values = _arguments(entry.args)
    names = named["fields"].split(",")
    columns = {name: values[at :: len(names)] for at, name in enumerate(names)}
    return dict(zip(columns["id"], columns["payload"], strict=True))


def accepted_rows(entry: Entry) -> Iterator[Row]:
    """Yields the rows that a recorded call of `publish` wrote."""
    rows, _ = _rows_and_held(entry.args)
    for row, status in zip(rows, entry.reply[0], strict=True):
        if status == "ok":
            yield row


def lease_ms_of(entry: Entry) -> int | None:
    """Returns the lease time in milliseconds that a call sets; None if the call sets no lease."""
    if entry.script == "publish":
        return int(entry.args[0])
    if entry.script == "claim":
        return int(_arguments(entry.args)[0]["lease_ms"])
    return None


def session_of(entry: Entry) -> str:
    """Returns the session of a claim; empty for other calls."""
    return _arguments(entry.args)[0].get("session", "") if entry.script == "claim" else ""


def _call(entry: Entry, parse: Any) -> Call[Any]:
    return Call(entry.script, entry.args, parse)


def _arguments(args: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    """Returns named arguments, and the values after them."""
    end = args.index("then") if "then" in args else len(args)
    return dict(zip(args[1:end:2], args[2:end:2], strict=True)), args[end + 1 :]


def _rows_and_held(args: Sequence[str]) -> tuple[list[Row], list[Held]]:
    end = 2 + int(args[1]) * _NUM_ROW
    rows = []
    for at in range(2, end, _NUM_ROW):
        request_id, fence, start, stop, *rest = args[at : at + _NUM_ROW]
        rows.append(Row(request_id, fence, int(start), int(stop), *rest))
    return rows, _held(args[end:])


def _held(args: Sequence[str]) -> list[Held]:
    held = [args[at : at + _NUM_HELD] for at in range(0, len(args), _NUM_HELD)]
    return [Held(name, fence, int(tokens) if tokens else None) for name, fence, tokens in held]


def _attempt(before: View, request_id: str, fence: str) -> int:
    """Returns the attempt of a fence. A fence of the newest attempt's number with another nonce is
    of a request that is forgotten, or of nobody."""
    attempt = int(fence.partition("-")[0])
    is_newest = attempt == before.attempt(request_id)
    is_forged = is_newest and before.fields(request_id).get("fence", fence) != fence
    return FORGOTTEN if is_forged else attempt


def _publish(entry: Entry, before: View) -> Move:
    rows, held = _rows_and_held(entry.args)
    return Move(
        "publish",
        entry.name,
        (scripts.publish(int(entry.args[0]), rows, held),),
        tuple(dict.fromkeys(item.request_id for item in (*rows, *held))),
        tuple((row, _attempt(before, row.request_id, row.fence)) for row in rows),
        _holders(before, held),
    )


def _release(entry: Entry, before: View) -> Move:
    num_args = len(entry.args) // _NUM_HELD * _NUM_HELD
    held = _held(entry.args[:num_args])
    is_break = len(entry.args) - num_args == 1
    ids = tuple(item.request_id for item in held)
    call = _call(entry, scripts.release([]).parse)
    kind = "break" if is_break else "release"
    return Move(kind, entry.name, (call,), ids, holders=_holders(before, held))


def _holders(before: View, held: list[Held]) -> tuple[tuple[str, int], ...]:
    return tuple((item.request_id, _attempt(before, item.request_id, item.fence)) for item in held)


def _claim(entry: Entry) -> Move:
    named, _ = _arguments(entry.args)
    context = ClaimContext(
        session=named.get("session", ""),
        answered=named.get("answered", ""),
        number=int(named.get("number", 0)),
    )
    room, model = Room(0, 0), ModelIdentity(named.get("model", ""), named.get("fingerprint", ""))
    nonce = named["nonce"]
    call = scripts.claim("", int(named["lease_ms"]), room, nonce, "", model, context)
    call = _call(entry, call.parse)
    return Move("claim", entry.name, (call,), (), nonce=nonce, context=context)
