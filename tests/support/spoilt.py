"""Spoilt records, as other programs or accidents leave them: values and keys of many wrong
types."""

from __future__ import annotations

from typing import Any

from promptq.shared.protocol.keys import ALIASES, QUEUES
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue

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
    "half characters in members": b'{"index":0,"token_ids":[1],"text":"\\ud800","finish_reason":'
    b'"error","error":{"type":"dead_letter","message":"\\udfff"},"stop_reason":"\\ud800"}',
    "half characters in a list": b'[{"attempt":1,"worker":"\\ud800","how":"\\udfff"}]',
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
    "a time in the far future": b"4102444800000",
    "a whole number with a fraction": b"1.0",
    "a number in words of another language": "\u0661\u0662".encode(),
    "a number with underscores": b"1_000",
    "a number between spaces": b" 1\n",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"index":0}'.encode("utf-16"),
    "two objects": b"{}{}",
    "a comment": b"{} // x",
    "a megabyte": b"x" * 2**20,
    "a truth for a number": b'{"index":true,"token_ids":[true],"text":"a","finish_reason":"stop"}',
    "an error without words": b'{"index":0,"token_ids":[],"text":"","finish_reason":"error"}',
    "extreme numbers": b'{"index":0,"token_ids":[1],"text":"a","attempt":1,"finish_reason":"stop",'
    b'"usage":{"prompt_tokens":9223372036854775807,"completion_tokens":-9223372036854775808},'
    b'"stats":{"queue_ms":1e308,"prompt_ms":1e308,"generation_ms":-1e308,"preempted_at":[1e308]}}',
    "an embedding that is none": b'{"index":0,"token_ids":[],"text":"","finish_reason":"stop",'
    b'"embedding":"?"}',
}
"""Values for a field, an entry or a message, by their fault."""


def make_of_type(client: Any, key: str, kind: str) -> None:
    """Replace a key's value by a spoilt value of this type."""
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


def spoil_queue(client: Any, queue: RequestQueue, value: bytes) -> None:
    """Write the value into every key and field that a role may write, next to valid values."""
    keys, name = queue.keys, value[:300]
    fields = ("history", "last_event", "result", "state", "attempt", "priority", "enqueued_at")
    spoilt = {"payload": '{"prompt":"a"}', **dict.fromkeys(fields, value)}
    client.hset(keys.request("spoilt"), mapping=spoilt)
    client.hset(keys.request("grave"), mapping={**spoilt, "state": "dead"})
    client.zadd(keys.dead, {"grave": 1, "well": 2, name: 3})
    client.hset(keys.request("well"), mapping={"payload": '{"prompt":"a"}', "state": "dead"})
    client.zadd(keys.workers, {"spoilt": 2**52, name: 2**52})
    numbers = ("step_ms", "max_model_len", "num_running", "max_num_seqs", "state", "untold")
    client.hset(keys.worker("spoilt"), mapping=dict.fromkeys(numbers, value) | {"worker_id": "x"})
    client.hset(keys.slots("well"), mapping={"told_at": value, "slots": value})
    now = queue.run(lookups.server_time_ms())
    rates = ("waiting", "priorities", "tokens_per_second", "worker_tokens_per_second", "running")
    client.xadd(keys.statistics, {"waiting": 5}, id=f"{now - 9000}-0")
    client.xadd(keys.statistics, dict.fromkeys(rates, value), id=f"{now - 8000}-0")
    opened = dict.fromkeys(("generated_tokens", "ttft:5", "queue:3", "claiming", "waiting"), value)
    client.hset(keys.prefix + "statistics:open", mapping={**opened, "bucket": now - 6000})
    client.sadd(QUEUES, name)
    client.hset(ALIASES, name, value)
    client.hset(keys.api_keys, mapping={"f" * 64: value, "e" * 64: '{"name":"well"}'})
    settings = ("model", "fingerprint", "tool_call_style", "paused", "pubsub", "aging_ms")
    client.hset(keys.config, mapping=dict.fromkeys(settings, value))
    client.hset(keys.model, mapping=dict.fromkeys((*settings, "standby_until"), value))
