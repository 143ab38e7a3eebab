"""What strangers and bad luck leave in records: values of 30 kinds, and keys of wrong types."""

from __future__ import annotations

from typing import Any

SPOILT: dict[str, bytes] = {
    "empty": b"",
    "a word": b"x",
    "half an object": b'{"index":',
    "null": b"null",
    "true": b"true",
    "a list": b"[1]",
    "an object without members": b"{}",
    "text as JSON": b'"text"',
    "a negative number": b"-1",
    "a fraction": b"1.5",
    "not a number": b"NaN",
    "infinity": b"-Infinity",
    "a number beyond floats": b"1e999",
    "a number beyond 64 bits": b"9" * 30,
    "a number of 5,000 digits": b"9" * 5000,
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "deep and whole": b"[" * 5000 + b"]" * 5000,
    "no UTF-8": b"\xff\xfe",
    "half a character": b"\xed\xa0\x80",
    "half a character in JSON": b'"\\ud800"',
    "zero bytes": b"\x00\x00",
    "control characters": b"\x1b[2J\r\n\xe2\x80\xa8",
    "members of wrong types": b'{"index":"x","token_ids":{},"text":1,"error":"x","usage":[],'
    b'"finish_reason":"stop","name":1,"model":1,"priority":[],"pieces":1,"ending":1}',
    "an unknown word": b'{"index":0,"token_ids":[],"text":"","finish_reason":"vanished"}',
    "no end": b'{"index":0,"token_ids":[1],"text":"a"}',
    "a negative index": b'{"index":-5,"token_ids":[1],"text":"a","finish_reason":"stop"}',
    "an index beyond 64 bits": b'{"index":%s,"token_ids":[],"text":"","finish_reason":"stop"}'
    % (b"9" * 30),
    "a token id beyond 64 bits": b'{"index":0,"token_ids":[%s],"text":"a","finish_reason":"stop"}'
    % (b"9" * 30),
    "a NaN inside": b'{"index":0,"token_ids":[1],"text":"a","finish_reason":"stop","logprobs":'
    b'[{"token_id":1,"logprob":NaN,"rank":1}],"stats":{"queue_ms":NaN}}',
    "an infinity as null": b'{"index":0,"token_ids":[1],"text":"a","finish_reason":"stop",'
    b'"logprobs":[{"token_id":1,"logprob":null,"rank":1}],"usage":{}}',
}
"""Values for a field, an entry or a message, by what is wrong with them."""


def make_of_type(client: Any, key: str, kind: str) -> None:
    """Replace a key by one of this type that holds a spoilt value."""
    client.delete(key)
    match kind:
        case "string":
            client.set(key, "x")
        case "list":
            client.rpush(key, "x", b"\xff")
        case "set":
            client.sadd(key, "x", b"\xff")
        case "zset":
            client.zadd(key, {"x": float("inf"), b"\xff": 1})
        case "hash":
            client.hset(key, mapping={b"x": "x", b"\xff": b"\xff"})
        case "stream":
            client.xadd(key, {b"x": b"\xff"}, id="1-0")


TYPES = ("string", "list", "set", "zset", "hash", "stream")
