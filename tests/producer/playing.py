"""A worker played by hand, readers that run beside the test, unfit servers."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from promptq import AsyncClient, Client
from promptq.shared.protocol.claims import Claim, Room
from promptq.shared.protocol.events import TokenEvent, Usage
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.rows import Published, Row
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.roles import QueueClient, as_role

KEYS = Keys("default")
PROMPTQ = [sys.executable, "-m", "promptq.producer.cli"]

Run = Callable[..., subprocess.CompletedProcess[str]]
"""Runs the command to its end."""

Start = Callable[..., subprocess.Popen[str]]
"""Starts the command."""


class HandWorker:
    """Claims and publishes with the real scripts, one event at a time, as the test tells it to."""

    def __init__(self, client: Any) -> None:
        self.redis = client
        self.queue = RequestQueue(client, worker_id="by-hand")
        self._ends: dict[str, int] = {}

    def take(self) -> Claim:
        """Claim the request at the front of the queue."""
        [claim] = self.queue.take_batch(Room(max_count=1, token_budget=2**40))
        self.adopt(claim)
        return claim

    def take_next(self) -> Claim:
        """Claims the next request, once there is one."""
        claim = self.queue.take()
        assert claim is not None
        self.adopt(claim)
        return claim

    def payload(self, request_id: str) -> dict[str, Any]:
        """The payload of the request."""
        fields: dict[str, Any] = json.loads(self.redis.hget(KEYS.request(request_id), "payload"))
        return fields

    def event(
        self, claim: Claim, text: str, last: FinishReason | None = None, **fields: Any
    ) -> TokenEvent:
        """The next event: one token for each letter of `text`."""
        index = self._ends[claim.request_id]
        self._ends[claim.request_id] = index + len(text)
        return TokenEvent(
            index=index,
            token_ids=[ord(letter) for letter in text],
            text=text,
            attempt=claim.attempt,
            finish_reason=last,
            usage=Usage(prompt_tokens=3, completion_tokens=index + len(text)) if last else None,
            **fields,
        )

    def send(
        self, claim: Claim, text: str, last: FinishReason | None = None, **fields: Any
    ) -> Published:
        """Publish the next event the proper way."""
        event = self.event(claim, text, last, **fields)
        return self.queue.publish([Row.of(claim.request_id, claim.fence, event)])

    def finish(self, claim: Claim, text: str = "") -> Published:
        return self.send(claim, text, FinishReason.STOP)

    def log_only(self, claim: Claim, text: str) -> None:
        """An event whose message is lost on the way to the subscribers."""
        event = self.event(claim, text)
        key = KEYS.tokens(claim.request_id)
        self.redis.xadd(key, {"event": event.to_json()}, id=f"{event.end}-0")

    def channel_only(self, request_id: str, event: TokenEvent | str) -> None:
        """A message that no log knows."""
        message = event if isinstance(event, str) else event.to_json()
        self.redis.publish(KEYS.events(request_id), message)

    def finish_unheard(self, claim: Claim, text: str) -> None:
        """End the request while its channel has another name for the script."""
        self.redis.hset(KEYS.config, "pubsub", "sharded")
        self.finish(claim, text)
        self.redis.hdel(KEYS.config, "pubsub")

    def adopt(self, claim: Claim) -> None:
        """Go on with a claim that was taken elsewhere."""
        self._ends[claim.request_id] = claim.events[-1].end if claim.events else 0

    @contextmanager
    def finishing(self, texts: list[str]) -> Iterator[None]:
        """Claim and finish requests beside the test as they come, one with each text."""

        def work() -> None:
            for text in texts:
                claim = self.take_next()
                self.send(claim, text[:1])
                self.finish(claim, text[1:])

        thread = threading.Thread(target=work)
        thread.start()
        yield
        thread.join()

    def fold_now(self, request_id: str) -> None:
        """Let the log's time run out."""
        self.redis.delete(KEYS.tokens(request_id))


class Reader:
    """Reads a stream in a thread of its own, with a sync or an async client."""

    def __init__(self, read: Callable[[Callable[[TokenEvent], None]], None]) -> None:
        self.events: list[TokenEvent] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._done = False
        self._thread = threading.Thread(target=self._run, args=(read,))
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    def wait_for(self, text: str) -> None:
        """Return once so much was read; raises what the stream raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or len(self.text) >= len(text))
        if self._error is not None:
            raise self._error
        assert self.text == text

    def finish(self) -> list[TokenEvent]:
        """All events, after the stream ended; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.events

    def _run(self, read: Callable[[Callable[[TokenEvent], None]], None]) -> None:
        try:
            read(self._add)
        except BaseException as error:
            self._error = error
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _add(self, event: TokenEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()


def read_sync(
    connect: Callable[[], Any], request_id: str, options: dict[str, Any], from_index: int
) -> Reader:
    def read(add: Callable[[TokenEvent], None]) -> None:
        with closing(connect()) as connection, Client(connection, **options) as client:
            for event in client.stream(request_id, from_index=from_index):
                add(event)

    return Reader(read)


def read_async(
    connect: Callable[[], Any], request_id: str, options: dict[str, Any], from_index: int
) -> Reader:
    async def read(add: Callable[[TokenEvent], None]) -> None:
        async with aclosing(connect()) as connection, AsyncClient(connection, **options) as client:
            async for event in client.stream(request_id, from_index=from_index):
                add(event)

    return Reader(lambda add: asyncio.run(read(add)))


class BlockingAsyncClient:
    """An AsyncClient whose methods are called as those of a Client."""

    def __init__(self, runner: asyncio.Runner, *args: Any, **options: Any) -> None:
        self._runner = runner

        async def make() -> AsyncClient:
            return AsyncClient(*args, **options)

        self._client = runner.run(make())

    def stream(self, request_id: str, **options: Any) -> list[TokenEvent]:
        async def collect() -> list[TokenEvent]:
            return [event async for event in self._client.stream(request_id, **options)]

        return self._runner.run(collect())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *args, **options: self._runner.run(method(*args, **options))


@contextmanager
def old_server(version: str) -> Iterator[str]:
    """Answers every command as a server of that version answers INFO; nobody ships so old one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,)).start()

        def answer(connection: socket.socket) -> None:
            text = f"# Server\r\nredis_version:{version}\r\n"
            with connection:
                while request := connection.recv(65536):
                    for line in request.split(b"\r\n"):
                        match line.upper():
                            case b"INFO":
                                connection.sendall(f"${len(text)}\r\n{text}\r\n".encode())
                            case b"HELLO":
                                connection.sendall(b"%1\r\n+proto\r\n:3\r\n")
                            case b"CLIENT":
                                connection.sendall(b"+OK\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@contextmanager
def losing_one_reply(url: str, to: bytes) -> Iterator[str]:
    """A way to the server on which the connection drops once, before the reply to a command.

    The command is one that the server carries out, so NOSCRIPT does not count.
    """
    port = urlsplit(url).port
    lost = threading.Event()

    def carry(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            while request := client.recv(2**20):
                server.sendall(request)
                reply = server.recv(2**20)
                if to in request and not reply.startswith(b"-") and not lost.is_set():
                    lost.set()
                    return
                client.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                pool.submit(carry, client)

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield url.replace(f":{port}/", f":{listener.getsockname()[1]}/")
        assert lost.is_set()
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()


def bury(redis_url: str, *request_ids: str) -> None:
    """Make dead letters of new requests, by crashes of workers that nobody sees."""
    with Client(redis_url) as client:
        for request_id in request_ids:
            client.enqueue("[bold]boom[/]", request_id=request_id, max_tokens=9)
    crash_until_dead(redis_url, *request_ids)


def crash_until_dead(redis_url: str, *request_ids: str) -> None:
    """Make dead letters of the requests that wait, which are these alone."""
    by_hand = QueueClient.from_url(as_role("", redis_url))
    with by_hand as connection, Client(redis_url) as client:
        connection.hset(KEYS.config, "crash_backoff_ms", "0")
        queue = RequestQueue(connection, worker_id="victim", max_crashes=2)
        hand = HandWorker(connection)
        hand.queue = queue
        while any(client.state(it) is not RequestState.DEAD for it in request_ids):
            claim = hand.take()
            hand.send(claim, "x")
            connection.zadd(KEYS.leases, {claim.request_id: 1})
            queue.reap()
