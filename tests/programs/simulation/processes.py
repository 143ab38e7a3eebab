"""The programs of a world's processes: workers and clients, with the real code of promptq."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar, cast

import redis

from promptq.producer.clients.async_client import AsyncClient
from promptq.shared.errors import RedisSideError, RequestExistsError
from promptq.shared.protocol.claims import Claims, Held, ModelIdentity, Room
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.rows import Published, Row, RowStatus
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.leases.prefetcher import _MANY_WORKERS
from promptq.worker.serve.build import Served
from promptq.worker.serve.process import open_when_there
from promptq.worker.serve.worker import Worker
from promptq.worker.text.tokenizer import ByteTokenizer
from tests.programs.chaos.audit.records import Claimed, Kind, Queue, Seen, SeenEvent, Sent
from tests.programs.simulation.auditor import Stream, is_cancelled_while_it_runs
from tests.programs.simulation.engine import SimulatedEngine, SimulatedRunner, engine_of
from tests.programs.simulation.loop import PROCESS, Process
from tests.programs.simulation.notes import Claim, Drain, DueClaim, Notes, Step
from tests.support.model_free import END_TOKEN_ID

T = TypeVar("T")

HOST = "server"
URL = f"redis://{HOST}:6379/0"
QUEUE = Queue.VOLUME
SIZES = ((8, 36), (2, 72), (8, 24))
"""Slots and KV blocks of a worker: so few blocks that a full batch preempts, or few slots."""
MUCH_ROOM = (8, 400)
"""Enough blocks for any batch: claims take only requests that fit out of order by preference."""
BLOCK_SIZE = 8
_LARGEST_REQUEST = 184
"""KV tokens that are enough for any request: its prompt and its output."""
_AGAIN_SECONDS = 0.05
_WAIT_SECONDS = 60.0


class NotingQueue(AsyncRequestQueue):
    """Records each claim, the number of tokens before it, and the time since when the claim was
    due."""

    notes: Notes
    """The records of the world that runs now."""
    worker: Worker | None = None
    _due_at: float | None = None

    async def take_batch(self, room: Room) -> Claims:
        process = PROCESS.get()
        if self.worker is not None and self._due_at is not None:
            due = DueClaim(
                process.name, self._due_at, process.loop.now, self.worker.intake.num_workers
            )
            if process.paused_at < self._due_at:
                self.notes.due_claims.append(due)
        self._due_at = None
        claims = await super().take_batch(room)
        if self._is_next_due(claims):
            self._due_at = process.loop.now
        for claim in claims:
            claimed = Claimed(claim.request_id, claim.attempt, claim.num_logged)
            self.notes.claims.append(Claim(process.name, process.loop.now, claimed))
        return claims

    def _is_next_due(self, claims: Claims) -> bool:
        """Returns whether a message came during an empty claim of a worker with room.

        One of many workers first asks whether a request waits, so its claim is not due."""
        worker = self.worker
        if worker is None or not worker.intake.is_running or claims or claims.next_skip:
            return False
        if worker.intake.num_workers > _MANY_WORKERS:
            return False
        return worker.leases.wake_up._work_came and worker.intake._policy.room().max_count > 0

    async def publish(self, rows: Sequence[Row], held: Sequence[Held] = ()) -> Published:
        attempts = [(row.request_id, row.fence) for row in rows]
        self.notes.useless_rows += [attempt for attempt in attempts if attempt in self.notes.over]
        published = await super().publish(rows, held)
        self.notes.over.update(
            attempt
            for attempt, status in zip(attempts, published.rows, strict=True)
            if status.is_lost and status is not RowStatus.GAP
        )
        return published


@cache  # because reading settings takes as long as serving five requests
def _settings() -> WorkerSettings:
    return WorkerSettings(queue=QUEUE, max_crashes=1000, redis_wait=_WAIT_SECONDS)


class WorkerProgram:
    """`promptq worker` in a simulated process, without its command line and signals."""

    def __init__(
        self,
        process: Process,
        rng: random.Random,
        *,
        notes: Notes,
        lease_ms: int,
        sizes: Sequence[tuple[int, int]] = SIZES,
    ) -> None:
        self.process = process
        self._sizes = sizes
        self.worker: Worker | None = None
        self.queue: NotingQueue | None = None
        self.ready_at: float | None = None
        """The world's time at which the worker began to claim."""
        self.stops_at: float | None = None
        """The world's time at which the worker began to stop."""
        self.stop = asyncio.Event()
        """Set by the first SIGTERM."""
        self.stop_now = asyncio.Event()
        """Set by the second SIGTERM."""
        self.engine: SimulatedEngine | None = None
        self._rng = rng
        self._notes = notes
        self.settings = _settings().model_copy(
            update={
                "lease_ms": lease_ms,
                "max_events_per_second": rng.choice([20.0, 5.0, 1e6]),
                "drain_seconds": rng.choice([20.0, 0.1]),
            }
        )
        notes.events_per_second[process.name] = self.settings.max_events_per_second
        self.main = process.start(self._run())

    async def _run(self) -> None:
        client = await open_when_there(URL, _WAIT_SECONDS)
        try:
            num_slots, num_blocks = self._rng.choice(self._sizes)
            slowness = self._rng.choice([1, 4, 10])
            runner = SimulatedRunner(num_blocks, BLOCK_SIZE, self.process, self._rng, slowness)
            self.engine = SimulatedEngine(engine_of(runner, num_slots), runner, self._note_step)
            served = Served(
                engine=self.engine,
                tokenizer=ByteTokenizer(),
                identity=ModelIdentity("model-free", "model-free"),
                end_token_ids=frozenset({END_TOKEN_ID}),
                device="none",
                dtype="none",
            )
            self.worker = worker = Worker(self.settings, served, client)
            self.queue = cast("NotingQueue", worker._queue)
            self.queue.worker = worker
            try:
                await worker.start()
                self.ready_at = self.process.loop.now
                await worker.serve(self.stop)
                await worker.drain(self.stop_now)
            finally:
                self.stops_at = self.process.loop.now
                await worker.stop()
        finally:
            await client.aclose()

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id if self.worker else ""

    @property
    def has_unanswered_claim(self) -> bool:
        return self.queue is not None and self.queue.has_unanswered_claim

    @property
    def num_held(self) -> int:
        return len(self.worker.leases) if self.worker else 0

    @property
    def most_held(self) -> int:
        """The most requests that the worker may hold: two for each sequence in the engine (one may
        preempt the other), and two for each ready request."""
        if self.worker is None:
            return 0
        return 2 * (self.worker.leases.num_places + self.worker.intake._policy.depth)

    @property
    def has_room(self) -> bool:
        """Whether the worker has room for the largest request of a world."""
        if self.worker is None:
            return False
        room = self.worker.intake._policy.room()
        return room.max_count > 0 and room.token_budget >= _LARGEST_REQUEST

    @property
    def running(self) -> set[str]:
        """The ids of the requests in the engine."""
        if self.worker is None:
            return set()
        return {lease.request_id for lease in self.worker.leases._running.values()}

    @property
    def is_serving(self) -> bool:
        return self.ready_at is not None and not self.stop.is_set()

    def drain(self) -> None:
        """Order the program to end, as the first SIGTERM does."""
        now, grace_seconds = self.process.loop.now, self.settings.drain_seconds
        self._notes.drains.setdefault(self.process.name, Drain(grace_seconds, now))
        self.stop.set()

    def _note_step(self, request_id: str, num_tokens: int, begins: bool) -> None:
        step = Step(self.process.name, self.process.loop.now, num_tokens, begins)
        self._notes.steps[request_id].append(step)

    def check_idle(self) -> str:
        """Checks the engine after a drain. Returns what the engine still holds; empty if it holds
        nothing."""
        if self.engine is None:
            return ""
        self.engine.engine.check_integrity()
        used = self.engine.engine.stats.num_used_blocks
        return f"{used} KV blocks are still in use" if used else ""


@dataclass
class Work:
    """The requests of a client, and the state that survives the client: a killed client starts
    again with this state."""

    requests: list[Sent]
    seconds: float
    """Seconds within which new requests are sent."""
    notes: Notes
    streams: list[Stream] = field(default_factory=list)
    num_starts: int = 0
    sent: set[int] = field(default_factory=set)
    """Numbers of requests of which the client knows that they were accepted."""
    over: set[int] = field(default_factory=set)
    """Numbers of requests whose streams have ended."""
    all_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while all requests are over."""


class ClientProgram:
    """Producers and subscribers of one simulated process. The program waits for more requests until
    `drain`."""

    def __init__(self, process: Process, rng: random.Random, *, work: Work) -> None:
        self.process = process
        self._rng = rng
        self._work = work
        self._is_draining = False
        self._has_more = asyncio.Event()
        work.num_starts += 1
        for stream in work.streams:
            stream.is_cut_off = stream.ended_at is None
        self.main = process.start(self._run())

    def drain(self) -> None:
        """End the program when all its requests have ended."""
        self._is_draining = True
        self._has_more.set()

    def serve_more(self) -> None:
        """Send the requests that were added to the work."""
        self._has_more.set()

    async def _run(self) -> None:
        clients = AsyncClient(URL, QUEUE), AsyncClient(URL, QUEUE)
        for client in clients:
            await persist(client.__aenter__)
        while not self._is_draining:
            self._has_more.clear()
            await self._serve_all(*clients)
            self._work.all_over.set()
            await self._has_more.wait()
        for client in clients:
            await client.close()

    async def _serve_all(self, producer: AsyncClient, subscriber: AsyncClient) -> None:
        """Send all requests, and follow their streams to the end."""
        work = self._work
        numbers = [number for number in range(len(work.requests)) if number not in work.over]
        serving = []
        for number in numbers:
            serving.append(asyncio.create_task(self._serve(number, producer, subscriber)))
            gap = min(2.0, 4 * self._rng.random() ** 3)  # requests come in bursts
            await asyncio.sleep(work.seconds * gap / len(numbers))
        await asyncio.gather(*serving)

    async def _serve(self, number: int, producer: AsyncClient, subscriber: AsyncClient) -> None:
        request = self._work.requests[number]
        if number not in self._work.sent:
            await self._send(request, producer)
            self._work.sent.add(number)
        names = ["first", "second"] if self._rng.random() < 0.2 else ["first"]
        listening = [
            asyncio.create_task(self._subscribe(request, name, subscriber)) for name in names
        ]
        if request.kind is Kind.CANCEL and not request.cancel_status:
            await asyncio.sleep(self._rng.random())
            status = await persist(lambda: producer.cancel(request.request_id))
            request.cancel_status = CancelStatus(status).value
            if is_cancelled_while_it_runs(request):
                self._work.notes.cancels.append((request, self.process.loop.now))
        await asyncio.gather(*listening)
        self._work.over.add(number)

    async def _send(self, request: Sent, producer: AsyncClient) -> None:
        """Sends a request until it is certainly accepted. If its id is taken, it was accepted.

        A client that was killed before the answer repeats the call. If the request has an
        idempotency key, the client uses another id.
        """

        async def send(request_id: str) -> str:
            with suppress(RequestExistsError):
                return await persist(
                    lambda: producer.enqueue(
                        request_id=request_id, delay_ms=request.delay_ms, **request.fields
                    )
                )
            return request_id

        ids = [request.request_id]
        if request.kind is Kind.TWICE:
            again = f"{request.request_id}:again"
            ids = (
                [f"{again}{self._work.num_starts}"] if self._work.num_starts > 1 else [*ids, again]
            )
        request.answers += await asyncio.gather(*map(send, ids))
        request.request_id = request.answers[0]

    async def _subscribe(self, request: Sent, name: str, client: AsyncClient) -> None:
        if self._rng.random() < 0.2:
            await asyncio.sleep(2 * self._rng.random())
        record = Seen(f"{self.process.name}-{name}", request.request_id, [])
        stream = Stream(record, self.process.loop.now)
        self._work.streams.append(stream)
        try:
            async for event in client.stream(request.request_id):
                record.events.append(SeenEvent.of(event))
                stream.times.append(self.process.loop.now)
                how = f"{event.index} {event.text!r} {event.finish_reason or ''}"
                self.process.loop.tell(self.process, f"sees {request.request_id} {how}")
        except Exception as error:  # whatever it is, a subscriber must not see it
            record.error = f"{type(error).__name__}: {error}"
        stream.ended_at = self.process.loop.now


async def persist(action: Callable[[], Awaitable[T]]) -> T:
    """Call `action` until it succeeds, because calls of producers may fail while the server is
    away."""
    while True:
        try:
            return await action()
        except (RedisSideError, redis.RedisError, OSError):
            await asyncio.sleep(_AGAIN_SECONDS)
