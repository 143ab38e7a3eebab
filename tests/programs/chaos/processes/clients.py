"""Producers and subscribers in a separate process, which writes its records.

`python -m tests.programs.chaos.processes.clients NAME SEED PRODUCERS_URL SUBSCRIBERS_URL JOURNAL
QUEUE=RATE ...`, with rates in requests a second. At the first SIGTERM, the process sends no more
requests, and ends when all its streams have ended. At the second SIGTERM, it records the unfinished
streams, and ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio

from promptq.producer.clients.async_client import AsyncClient
from promptq.producer.clients.sync_client import Client
from promptq.shared.errors import RedisSideError, RequestExistsError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import Request
from promptq.shared.server.cluster import client_of
from promptq.shared.server.connection import open_async_redis
from tests.programs.chaos.audit.records import (
    FLEET,
    Journal,
    Kind,
    Queue,
    Seen,
    SeenEvent,
    Sent,
)
from tests.programs.chaos.requests import make_request
from tests.programs.states.mutants import break_scripts
from tests.programs.traces.append_only import record_scripts

T = TypeVar("T")

_MOST_UNDER_WAY = 150
_AGAIN_SECONDS = 0.05
_PLAIN_SHARE = 0.1
_THREADED_SHARE = 0.05
_SECOND_SUBSCRIBER_SHARE = 0.2
_LATE_SHARE = 0.2


class Clients:
    """The producers and subscribers of one process, for one queue."""

    def __init__(
        self, name: str, queue: Queue, rng: random.Random, urls: tuple[str, str], journal: Journal
    ) -> None:
        self._name = name
        self._queue = queue
        self._rng = rng
        self._producers_url, self._subscribers_url = urls
        self._journal = journal
        self._producers = [AsyncClient(self._producers_url, queue) for _ in range(2)]
        self._subscribers = [AsyncClient(self._subscribers_url, queue) for _ in range(2)]
        self._threaded: Client | None = None
        self._plain: redis.asyncio.Redis | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    async def produce(self, rate: float, stop: asyncio.Event) -> None:
        """Send requests at about this rate, each with its subscribers, until `stop`."""
        self._plain = await _persist(lambda: open_async_redis(self._producers_url))
        self._threaded = await _persist(self._open_threaded)
        for client in [*self._producers, *self._subscribers]:
            await _persist(client.__aenter__)  # who never reached a server is told, not served
        while not stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rng.expovariate(rate)):
                    await stop.wait()
            if len(self._under_way) < _MOST_UNDER_WAY:
                task = asyncio.create_task(self._serve(make_request(self._queue, self._rng)))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)

    async def finish(self) -> None:
        """Wait until all streams have ended. If the calling task is cancelled, the unfinished
        streams are recorded."""
        try:
            while self._under_way:
                await asyncio.wait(self._under_way)
        finally:
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _serve(self, request: Sent) -> None:
        listening: list[asyncio.Task[None]] = []
        try:
            await self._send(request)
            num_subscribers = 2 if self._rng.random() < _SECOND_SUBSCRIBER_SHARE else 1
            subscribing = [self._subscribe(request, number) for number in range(num_subscribers)]
            listening = [asyncio.create_task(it) for it in subscribing]
            if request.kind is Kind.CANCEL:
                await asyncio.sleep(self._rng.uniform(0, 1.5))
                producer = self._rng.choice(self._producers)
                status = await _persist(lambda: producer.cancel(request.request_id))
                request.cancel_status = CancelStatus(status).value
            await asyncio.gather(*listening)
            if request.queue not in FLEET:  # what its log has, too
                await self._subscribe(request, num_subscribers)
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)
            if request.answers:
                self._journal.write(request)

    async def _send(self, request: Sent) -> None:
        """Send a request until it is certainly accepted. If its id is taken, it was accepted."""
        is_plain = request.kind is Kind.PLAIN and self._rng.random() < _PLAIN_SHARE
        if is_plain and request.queue is not Queue.POISON:
            await self._send_plainly(request)
        elif request.kind is Kind.TWICE:
            ids = [request.request_id, f"{request.request_id}:again"]
            sending = [
                _persist(lambda it=it, id_=id_: it.enqueue(request_id=id_, **request.fields))
                for it, id_ in zip(self._producers, ids, strict=True)
            ]
            request.answers = list(await asyncio.gather(*sending))
            request.request_id = request.answers[0]
        else:
            producer = self._rng.choice(self._producers)
            sending = _persist(
                lambda: producer.enqueue(
                    request_id=request.request_id, delay_ms=request.delay_ms, **request.fields
                )
            )
            with suppress(RequestExistsError):  # an earlier try got through; its reply was lost
                await sending
            request.answers = [request.request_id]

    async def _send_plainly(self, request: Sent) -> None:
        """Enqueues by plain commands, as docs/protocol.md describes."""
        assert self._plain is not None
        keys = Keys(self._queue)
        plain = client_of(self._plain, keys)
        payload = Request.build(request.fields).to_payload()

        async def send() -> None:
            seconds, microseconds = await plain.time()
            score = seconds * 1000 + microseconds // 1000
            async with plain.pipeline(transaction=True) as commands:
                commands.hset(keys.request(request.request_id), "payload", payload)
                commands.zadd(keys.pending, {request.request_id: score})
                await commands.execute()
            await plain.publish(keys.control, "pending")

        await _persist(send)
        request.answers = [request.request_id]

    async def _subscribe(self, request: Sent, number: int) -> None:
        if self._rng.random() < _LATE_SHARE:
            await asyncio.sleep(self._rng.uniform(0, 3))
        in_thread = self._rng.random() < _THREADED_SHARE
        kind = "threaded" if in_thread else "async"
        record = Seen(f"{self._name}-{kind}-{number}", request.request_id, [])
        try:
            if in_thread:
                assert self._threaded is not None
                stream = self._threaded.stream(request.request_id)
                await asyncio.to_thread(_follow, stream, record)
            else:
                client = self._rng.choice(self._subscribers)
                async for event in client.stream(request.request_id):
                    record.events.append(SeenEvent.of(event))
        except asyncio.CancelledError:
            record.error = record.error or "it had not ended when the run was over"
            raise
        except Exception as error:  # whatever it is, a subscriber must not see it
            record.error = f"{type(error).__name__}: {error}"
        finally:
            self._journal.write(record)

    async def _open_threaded(self) -> Client:
        return await asyncio.to_thread(Client, self._subscribers_url, self._queue)


def _follow(stream: Iterator[TokenEvent], record: Seen) -> None:
    for event in stream:
        record.events.append(SeenEvent.of(event))


async def _persist(action: Callable[[], Awaitable[T]]) -> T:
    """Try until the server answers: calls of producers may fail while it does not."""
    while True:
        try:
            return await action()
        except (RedisSideError, redis.RedisError, OSError):
            await asyncio.sleep(_AGAIN_SECONDS)


async def main(name: str, seed: str, producers: str, subscribers: str, *rest: str) -> None:
    journal = Journal(Path(rest[0]))
    stop, over = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    # A stream that waited long for a thread would find its log expired.
    loop.set_default_executor(ThreadPoolExecutor(_MOST_UNDER_WAY))
    loop.add_signal_handler(signal.SIGTERM, lambda: (over if stop.is_set() else stop).set())
    clients = []
    sending = []
    for asked in rest[1:]:
        queue, _, rate = asked.partition("=")
        rng = random.Random(f"{seed} {name} {queue}")
        clients.append(Clients(name, Queue(queue), rng, (producers, subscribers), journal))
        sending.append(clients[-1].produce(float(rate), stop))
    await asyncio.gather(*sending)
    finishing = asyncio.gather(*(it.finish() for it in clients))
    ending: Any = asyncio.create_task(over.wait())
    await asyncio.wait([finishing, ending], return_when=asyncio.FIRST_COMPLETED)
    if not finishing.done():
        faulthandler.dump_traceback()  # into the log: where do the threads hang?
    finishing.cancel()
    ending.cancel()
    await asyncio.gather(finishing, ending, return_exceptions=True)
    journal.close()
    os._exit(0)  # a thread whose stream hangs, which is written down, would keep the process


if __name__ == "__main__":
    break_scripts()
    record_scripts()
    asyncio.run(main(*sys.argv[1:]))
