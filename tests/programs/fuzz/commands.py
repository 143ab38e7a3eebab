"""Raw commands around a payload: spoilt ids, keys of wrong types, spoilt fields and logs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import Request

GOOD: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 4,
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 7,
    "stop": ["zzzz"],
    "logit_bias": {"5": 1.0},
    "metadata": {"a": [1, {"b": None}]},
    "priority": 1,
}

_FIELDS = [name for name in Request.model_fields if name != "version"]

_VALUES = [
    *["null", "true", "false", "0", "-1", "1", "-0.0", "1e308", "-1e308", "1e400", "0.1"],
    *["9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" * 400],
    *["NaN", "Infinity", "-Infinity", '""', '"x"', '" "', '"\\u0000"', '"\\ud800"', '"\\udfff x"'],
    *["[]", "[[]]", "{}", '{"":null}', "[null]", '[""]', "[-1]", "[1e3]", "[1.5]", "[257]"],
    *["[99999999999999999999]", '["a",1]', '{"a":{}}', '{"type":"json_object"}'],
    *['{"type":"json_schema","json_schema":{"schema":{"type":"object"}}}', '{"type":5}'],
    *['[{"role":"user","content":"x"}]', '[{"role":null}]', "[{}]", '[{"content":{"a":[]}}]'],
    *['[{"type":"function","function":{"name":"f"}}]', '"auto"', '"required"', '"http://x"'],
    *['"' + "x" * 5000 + '"', "[" + "1," * 300 + "1]", '"\\uD83D\\uDE00"', '"\u202e\u0000"'],
]
"""Values as JSON, or texts that look like JSON."""


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(0, 200))


def truncated(rng: random.Random) -> bytes:
    whole = json.dumps(GOOD).encode()
    return whole[: rng.randrange(len(whole))]


def mutated(rng: random.Random) -> bytes:
    """Returns a payload with some bytes changed, dropped, doubled or inserted."""
    data = bytearray(json.dumps(GOOD).encode())
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at]
            case 2:
                data.insert(at, rng.randrange(256))
            case 3:
                end = at + rng.randint(1, 20)
                data[at:at] = data[at:end]
    return bytes(data)


def wrong_values(rng: random.Random) -> bytes:
    """Returns a payload in which some fields have values of other types, or of extreme size."""
    fields = {name: json.dumps(value) for name, value in GOOD.items()}
    for _ in range(rng.randint(1, 3)):
        fields[rng.choice(_FIELDS)] = rng.choice(_VALUES)
    return _json_object(fields)


def bare_values(rng: random.Random) -> bytes:
    """Returns a value that is no object, or an object with few fields."""
    if rng.random() < 0.5:
        return rng.choice(_VALUES).encode("utf-8", "surrogatepass")
    return _json_object({rng.choice(_FIELDS): rng.choice(_VALUES)})


def unknown_fields(rng: random.Random) -> bytes:
    fields = {name: json.dumps(value) for name, value in GOOD.items()}
    name = "".join(chr(rng.choice([0, 34, 92, 97, 0x7F, 0xE9, 0x1F600])) for _ in range(4))
    return _json_object({**fields, name: rng.choice(_VALUES)})


def deeply_nested(rng: random.Random) -> bytes:
    depth = rng.choice([10, 100, 127, 128, 200, 1000, 5000, 20000])
    nested = rng.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth])
    if rng.random() < 0.2:
        return nested[: len(nested) // 2].encode()
    fields = {name: json.dumps(value) for name, value in GOOD.items()}
    return _json_object({**fields, rng.choice(["metadata", "prompt", "logit_bias"]): nested})


def broken_text(rng: random.Random) -> bytes:
    """Returns a payload whose prompt is no valid text: it has lone surrogates, stray bytes or
    control characters."""
    stray = [b"\xed\xa0\x80", b"\xff", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\\ud800", b"\x00", b"\n"]
    text = b"".join(rng.choice([*stray, b"abc"]) for _ in range(rng.randint(1, 6)))
    return b'{"max_tokens":3,"prompt":"' + text + b'"}'


def doubled_keys(rng: random.Random) -> bytes:
    value = rng.choice(_VALUES)
    name = rng.choice(list(GOOD))
    body = json.dumps(GOOD).encode()[:-1] + f',"{name}":'.encode()
    return body + value.encode("utf-8", "surrogatepass") + b"}"


def huge(rng: random.Random) -> bytes:
    """Returns a payload that is large for its kind. The payload rarely exceeds the limit."""
    if rng.random() < 0.01:
        return b'{"max_tokens":1,"prompt":"' + b"x" * (8 * 2**20) + b'"}'
    size = rng.choice([1000, 20_000])
    numbers = ",".join(str(rng.choice([1, 255, 256, 2**31, 2**64])) for _ in range(size))
    return f'{{"max_tokens":1,"prompt":[{numbers}]}}'.encode()


def newer_version(rng: random.Random) -> bytes:
    """Returns a payload of a later protocol version. The request waits for newer workers until it
    is cancelled."""
    return _json_object({"version": str(rng.randint(2, 99)), "prompt": '"x"'})


def good(rng: random.Random) -> bytes:
    return json.dumps({**GOOD, "seed": rng.randrange(2**40)}).encode()


KINDS: dict[Callable[[random.Random], bytes], float] = {
    random_bytes: 10,
    truncated: 10,
    mutated: 20,
    wrong_values: 40,
    bare_values: 5,
    unknown_fields: 4,
    deeply_nested: 3,
    broken_text: 5,
    doubled_keys: 3,
    huge: 0.3,
    newer_version: 0.3,
    good: 5,
}
"""The weight of each kind."""


def make_payload(rng: random.Random) -> tuple[str, bytes]:
    """Returns a payload and the name of its kind."""
    kinds = list(KINDS)
    kind = rng.choices(kinds, [KINDS[it] for it in kinds])[0]
    return kind.__name__, kind(rng)


def _json_object(fields: dict[str, str]) -> bytes:
    pairs = (f"{json.dumps(name)}:{value}" for name, value in fields.items())
    return ("{" + ",".join(pairs) + "}").encode("utf-8", "surrogatepass")


Command = tuple[Any, ...]

_RECORD_FIELDS = [
    "state",
    "attempt",
    "fence",
    "worker",
    "cancelled",
    "score",
    "priority",
    "enqueued_at",
]
_RECORD_FIELDS += ["claimed_at", "finished_at", "seed", "prompt_tokens", "crashes", "passed"]
_RECORD_FIELDS += [
    "finish_reason",
    "last_event",
    "result",
    "requeued_from",
    "forked_from",
    "suspect",
    "history",
    "alone",
]
_RECORD_FIELDS += ["tenant", "nonce"]

_WORDS: list[Any] = ["", "x", "-1", "0", "1", "1e400", "nan", "inf", "9" * 30, "1.5", "active"]
_WORDS += ["completed", "dead", "waiting", "[]", "{}", '{"index":0}', b"\xff\x00", "\u2028", " 1"]


@dataclass(frozen=True, slots=True)
class Thrown:
    """A malformed request: its kind, and the commands that enqueue it."""

    kind: str
    request_id: bytes
    commands: list[Command]
    may_wait: bool
    """Whether it is for newer workers, so that it waits until somebody cancels it."""

    def __str__(self) -> str:
        return f"{self.kind} {self.request_id[:80]!r}: {str(self.commands)[:400]}"


def make_request(keys: Keys, number: int, rng: random.Random) -> Thrown:
    """Returns a malformed request. Its id is made from `number`."""
    kind, payload = make_payload(rng)
    request_id = f"fuzz-{number}".encode()
    way = rng.choices(list(_WAYS), list(_WAYS.values()))[0]
    if way is _bad_id:
        request_id = _make_bad_id(rng)
    commands = way(keys, request_id, payload, rng)
    commands.append(("ZADD", keys.pending, rng.choice([0, 1, 1e15, "-inf", "+inf"]), request_id))
    if rng.random() < 0.05:  # sometimes in another place where a client might put it
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
    """Returns commands that make the request's hash or log a key of another type."""
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
    """Returns fields that only scripts should write."""
    spoilt = [it for name in rng.sample(_RECORD_FIELDS, 3) for it in (name, rng.choice(_WORDS))]
    key = _request(keys, request_id)
    return [("HSET", key, "payload", payload), ("HSET", key, *spoilt)]


def _spoilt_log(keys: Keys, request_id: bytes, payload: bytes, rng: random.Random) -> list[Command]:
    """Returns a log that no worker wrote."""
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
    """Returns commands for an id without a request."""
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
    """Returns a message for the control channel. The message is often nearly right."""
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
