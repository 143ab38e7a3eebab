"""Payloads that no client should send."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

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
"""As JSON, or what takes itself for it."""


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(0, 200))


def truncated(rng: random.Random) -> bytes:
    whole = json.dumps(GOOD).encode()
    return whole[: rng.randrange(len(whole))]


def mutated(rng: random.Random) -> bytes:
    """Some bytes changed, dropped, doubled or put in."""
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
    """Some fields with values of any type and size."""
    fields = {name: json.dumps(value) for name, value in GOOD.items()}
    for _ in range(rng.randint(1, 3)):
        fields[rng.choice(_FIELDS)] = rng.choice(_VALUES)
    return _json_object(fields)


def bare_values(rng: random.Random) -> bytes:
    """Something that is no object, or an object of little."""
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
    """Prompts that are no text: lone surrogates, stray bytes, control characters."""
    stray = [b"\xed\xa0\x80", b"\xff", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\\ud800", b"\x00", b"\n"]
    text = b"".join(rng.choice([*stray, b"abc"]) for _ in range(rng.randint(1, 6)))
    return b'{"max_tokens":3,"prompt":"' + text + b'"}'


def doubled_keys(rng: random.Random) -> bytes:
    value = rng.choice(_VALUES)
    name = rng.choice(list(GOOD))
    body = json.dumps(GOOD).encode()[:-1] + f',"{name}":'.encode()
    return body + value.encode("utf-8", "surrogatepass") + b"}"


def huge(rng: random.Random) -> bytes:
    """Large for its kind; rarely beyond what a payload may have."""
    if rng.random() < 0.01:
        return b'{"max_tokens":1,"prompt":"' + b"x" * (8 * 2**20) + b'"}'
    size = rng.choice([1000, 20_000])
    numbers = ",".join(str(rng.choice([1, 255, 256, 2**31, 2**64])) for _ in range(size))
    return f'{{"max_tokens":1,"prompt":[{numbers}]}}'.encode()


def newer_version(rng: random.Random) -> bytes:
    """Of a later protocol: left for newer workers, so it waits until somebody cancels it."""
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
    newer_version: 0.1,
    good: 5,
}
"""How often each kind comes."""


def make_payload(rng: random.Random) -> tuple[str, bytes]:
    """A payload and the name of its kind."""
    kinds = list(KINDS)
    kind = rng.choices(kinds, [KINDS[it] for it in kinds])[0]
    return kind.__name__, kind(rng)


def _json_object(fields: dict[str, str]) -> bytes:
    pairs = (f"{json.dumps(name)}:{value}" for name, value in fields.items())
    return ("{" + ",".join(pairs) + "}").encode("utf-8", "surrogatepass")
