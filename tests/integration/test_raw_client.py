"""Any client will do: enqueue, subscribe and cancel with nothing but sockets and the protocol."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from tests.support.model_free import running_worker, served_model_free, text_of
from tests.support.roles import as_role
from tests.support.waiting import async_until


class RawClient:
    """Speaks RESP2: a command is an array of bulk strings, a reply is one of five types."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0))
        self._replies = self._socket.makefile("rb")
        self.call("AUTH", parts.username or "", parts.password or "")

    def send(self, *words: str) -> None:
        encoded = [word.encode() for word in words]
        body = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)
        self._socket.sendall(b"*%d\r\n%s" % (len(words), body))

    def receive(self) -> Any:
        line = self._replies.readline().rstrip(b"\r\n")
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            raise AssertionError(f"the server says {rest.decode()}")
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._replies.read(int(rest) + 2)[:-2].decode()
        return None if rest == b"-1" else [self.receive() for _ in range(int(rest))]

    def call(self, *words: str) -> Any:
        self.send(*words)
        return self.receive()

    def close(self) -> None:
        self._replies.close()
        self._socket.close()


def enqueue(client: RawClient, request_id: str, payload: dict[str, Any], priority: int = 0) -> None:
    score = str(int(time.time() * 1000) + priority * 60_000)
    client.call("MULTI")
    name = f"promptq:{{default}}:request:{request_id}"
    client.call("HSET", name, "payload", json.dumps(payload))
    client.call("ZADD", "promptq:{default}:pending", score, request_id)
    assert client.call("EXEC") == [1, 1]
    client.call("PUBLISH", "promptq:{default}:control", "pending")


def converse(url: str, outcome: dict[str, Any]) -> None:
    """Blocking, in a thread of its own beside the worker's event loop."""
    client, reader, listener = (
        RawClient(as_role(role, url)) for role in ("producer", "subscriber", "subscriber")
    )
    listener.call("SUBSCRIBE", "promptq:{default}:events:live", "promptq:{default}:events:stopped")
    listener.receive()

    enqueue(client, "live", {"prompt": "Hello", "max_tokens": 20, "seed": 4})
    live: list[dict[str, Any]] = []
    while not live or live[-1]["finish_reason"] is None:
        live.append(json.loads(listener.receive()[2]))
    outcome["live"] = live
    log = reader.call("XRANGE", "promptq:{default}:tokens:live", "-", "+")
    outcome["log"] = [json.loads(fields[1]) for _, fields in log]
    outcome["log ids"] = [entry_id for entry_id, _ in log]
    outcome["state"] = client.call("HGET", "promptq:{default}:request:live", "state")

    enqueue(client, "stopped", {"prompt": "Hello", "max_tokens": 5000, "seed": 5}, priority=-1)
    stopped: list[dict[str, Any]] = [json.loads(listener.receive()[2]) for _ in range(5)]
    client.call("HSET", "promptq:{default}:request:stopped", "cancelled", "1")
    client.call("PUBLISH", "promptq:{default}:control", "cancel:stopped")
    while stopped[-1]["finish_reason"] is None:
        stopped.append(json.loads(listener.receive()[2]))
    outcome["stopped"] = stopped

    enqueue(client, "read", {"prompt": "Hello", "max_tokens": 10, "seed": 6})
    read: list[dict[str, Any]] = []
    last_id = "0"
    while not read or read[-1]["finish_reason"] is None:
        command = ("XREAD", "BLOCK", "5000", "STREAMS", "promptq:{default}:tokens:read", last_id)
        for _, entries in reader.call(*command) or []:
            read += [json.loads(fields[1]) for _, fields in entries]
            last_id = entries[-1][0]
    outcome["read"] = read
    client.close()
    reader.close()
    listener.close()


async def test_a_client_of_plain_sockets_can_do_it_all(redis_url: str) -> None:
    outcome: dict[str, Any] = {}
    async with running_worker(redis_url, served_model_free(step_seconds=0.002)):
        thread = threading.Thread(target=converse, args=(redis_url, outcome))
        thread.start()
        await async_until(lambda: not thread.is_alive())
        thread.join()

    assert "".join(event["text"] for event in outcome["live"]) == text_of(4, 20)
    assert outcome["live"] == outcome["log"]
    ends = [event["index"] + len(event["token_ids"]) for event in outcome["live"]]
    assert outcome["log ids"] == [*(f"{end}-0" for end in ends[:-1]), "20-1"]
    assert outcome["state"] == "completed"
    stopped = outcome["stopped"]
    assert stopped[-1]["finish_reason"] == "cancelled"
    assert stopped[-1]["usage"]["completion_tokens"] == stopped[-1]["index"] < 5000
    assert text_of(5, 5000).startswith("".join(event["text"] for event in stopped))
    assert "".join(event["text"] for event in outcome["read"]) == text_of(6, 10)
