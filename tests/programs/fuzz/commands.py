"""Raw commands around a payload: spoilt ids, keys of wrong types, spoilt fields and logs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from promptq.shared.protocol.keys import Keys
from tests.programs.fuzz.payloads import make_payload

Command = tuple[Any, ...]

_FIELDS = ["state", "attempt", "fence", "worker", "cancelled", "score", "priority", "enqueued_at"]
_FIELDS += ["claimed_at", "finished_at", "seed", "prompt_tokens", "crashes", "passed"]
_FIELDS += [
    "finish_reason",
    "last_event",
    "result",
    "requeued_from",
    "forked_from",
    "suspect",
    "history",
    "alone",
]
_FIELDS += ["tenant", "nonce"]

_WORDS: list[Any] = ["", "x", "-1", "0", "1", "1e400", "nan", "inf", "9" * 30, "1.5", "active"]
_WORDS += ["completed", "dead", "waiting", "[]", "{}", '{"index":0}', b"\xff\x00", "\u2028", " 1"]


@dataclass(frozen=True, slots=True)
class Thrown:
    """A malformed request: what it is, and the commands that put it in."""

    kind: str
    request_id: bytes
    commands: list[Command]
    may_wait: bool
    """Whether it is for newer workers, so that it waits until somebody cancels it."""

    def __str__(self) -> str:
        return f"{self.kind} {self.request_id[:80]!r}: {str(self.commands)[:400]}"


def make_request(keys: Keys, number: int, rng: random.Random) -> Thrown:
    """A malformed request; `number` makes its id."""
    kind, payload = make_payload(rng)
    request_id = f"fuzz-{number}".encode()
    way = rng.choices(list(_WAYS), list(_WAYS.values()))[0]
    if way is _bad_id:
        request_id = _make_bad_id(rng)
    commands = way(keys, request_id, payload, rng)
    commands.append(("ZADD", keys.pending, rng.choice([0, 1, 1e15, "-inf", "+inf"]), request_id))
    if rng.random() < 0.05:  # for once, where else a stranger might put it
        place = rng.choice([keys.delayed, keys.deadlines, keys.leases])
        commands.append(("ZADD", place, rng.choice([0, 1, "-inf", 1e12]), request_id))
    shown = kind if way is _plain else way.__name__.strip("_")
    return Thrown(shown, request_id, commands, kind == "newer_version")


def _plain(keys: Keys, request_id: bytes, payload: bytes, rng: random.Random) -> list[Command]:
    return [("HSET", _request(keys, request_id), "payload", payload)]


def _bad_id(keys: Keys, request_id: bytes, payload: bytes, rng: random.Random) -> list[Command]:
    return _plain(keys, request_id, payload, rng) if rng.random() < 0.5 else []


def _make_bad_id(rng: random.Random) -> bytes:
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randint(0, 40))
        case 1:
            return b"x" * rng.choice([201, 1000, 70_000])
        case 2:
            return rng.choice([b"a b", b"a\nb", b"\x00", "\u00e9".encode(), b"", b"a\x7f"])
    return rng.choice([b":", b"*", b"{x}", b"../x", b"}:pending", b"%s%n", b"$1"])


def _wrong_type(keys: Keys, request_id: bytes, payload: bytes, rng: random.Random) -> list[Command]:
    """The request's hash or its log is something else."""
    if rng.random() < 0.5:
        return [_of_any_type(_request(keys, request_id), payload, rng)]
    other = _of_any_type(keys.tokens("").encode() + request_id, payload, rng)
    return [("HSET", _request(keys, request_id), "payload", payload), other]


def _of_any_type(key: bytes, payload: bytes, rng: random.Random) -> Command:
    return rng.choice(
        [
            ("SET", key, payload),
            ("RPUSH", key, payload),
            ("SADD", key, payload),
            ("ZADD", key, 1, payload),
            ("HSET", key, payload, payload),
            ("XADD", key, "*", "event", payload),
        ]
    )


def _spoilt_fields(
    keys: Keys, request_id: bytes, payload: bytes, rng: random.Random
) -> list[Command]:
    """What only scripts should write."""
    spoilt = [it for name in rng.sample(_FIELDS, 3) for it in (name, rng.choice(_WORDS))]
    key = _request(keys, request_id)
    return [("HSET", key, "payload", payload), ("HSET", key, *spoilt)]


def _spoilt_log(keys: Keys, request_id: bytes, payload: bytes, rng: random.Random) -> list[Command]:
    """A log that no worker wrote."""
    key = keys.tokens("").encode() + request_id
    number = rng.choice(["1-0", "3-0", "4-1", "5-7", "99999999-0", "18446744073709551615-0"])
    event = rng.choice(
        [
            payload,
            b'{"index":0,"token_ids":[97],"text":"a","attempt":1}',
            b'{"index":-5,"token_ids":[999999],"text":"a"}',
            b'{"index":0,"token_ids":"x","text":1}',
            b'{"index":0,"token_ids":[],"text":"","finish_reason":"stop"}',
        ]
    )
    name = rng.choice(["event", "event", "other"])
    return [
        ("HSET", _request(keys, request_id), "payload", payload),
        ("XADD", key, number, name, event, *rng.choice([[], ["more", "x"]])),
    ]


def _nothing(keys: Keys, request_id: bytes, payload: bytes, rng: random.Random) -> list[Command]:
    """An id without a request."""
    return []


_WAYS: dict[Callable[[Keys, bytes, bytes, random.Random], list[Command]], float] = {
    _plain: 70,
    _bad_id: 5,
    _wrong_type: 8,
    _spoilt_fields: 10,
    _spoilt_log: 5,
    _nothing: 2,
}


def control_message(rng: random.Random) -> bytes:
    """Anything at all on the control channel, much of it nearly right."""
    match rng.randrange(5):
        case 0:
            return rng.randbytes(rng.randint(0, 100))
        case 1:
            return b"cancel:" + rng.randbytes(rng.randint(0, 50))
        case 2:
            return b"cancel:fuzz-%d" % rng.randrange(100_000)
        case 3:
            return rng.choice([b"pending", b"pending:x", b"cancel", b"cancel:", b"pause", b"\x00"])
    return b"cancel:" + b"x" * rng.choice([200, 201, 5000])


def _request(keys: Keys, request_id: bytes) -> bytes:
    return keys.request("").encode() + request_id
