"""A world: its plan, made from a seed, its run, and its audit."""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

import redis

from promptq.shared.protocol.keys import Keys
from promptq.worker.serve import worker as worker_module
from tests.programs.chaos.audit.auditor import Violation, audit
from tests.programs.chaos.audit.outcome import take_snapshot
from tests.programs.chaos.audit.records import Claimed, Sent
from tests.programs.chaos.requests import make_request
from tests.programs.simulation import clock
from tests.programs.simulation.auditor import (
    IDLE_SECONDS,
    PATIENCE_SECONDS,
    check_calm,
    check_idle,
    num_carried_on,
)
from tests.programs.simulation.loop import (
    EPOCH,
    Process,
    SimulatedLoop,
    SimulatedTask,
    StandstillError,
)
from tests.programs.simulation.network import Network
from tests.programs.simulation.plan import Fault, Plan, PlannedFault
from tests.programs.simulation.processes import (
    HOST,
    QUEUE,
    ClientProgram,
    NotingQueue,
    WorkerProgram,
)
from tests.programs.simulation.server import ServerProcess, SteppedServer
from tests.programs.simulation.trace import Trace

_MOST_CALLBACKS = 1_000_000
_MOST_TOKENS = 20
_MOST_CLOSINGS = 5  # each ends one more `finally` that waits


@dataclass
class Result:
    """The outcome of a world."""

    plan: Plan
    digest: str = ""
    violations: list[Violation] = field(default_factory=list)
    num_requests: int = 0
    num_commands: int = 0
    num_callbacks: int = 0
    virtual_seconds: float = 0.0
    settle_seconds: float = 0.0
    """Virtual seconds from the end of the faults until all requests had ended."""
    faults: Counter[Fault] = field(default_factory=Counter)
    num_carried_on: int = 0
    """Number of streams with events of several attempts."""


class _Place:
    """A place in the fleet, with its current worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_starts = 0
        self.worker: WorkerProgram | None = None
        self.watching: asyncio.Task[None] | None = None
        """Waits for the worker's end, or until a new one starts."""


class World:
    """The processes of one world, and the faults that happen to them."""

    def __init__(self, plan: Plan, server: ServerProcess, story: TextIO | None = None) -> None:
        self.plan = plan
        self.loop = SimulatedLoop(str(plan.seed), _MOST_CALLBACKS)
        self.trace = Trace(self.loop, story)
        self.network = Network(self.loop, self.trace)
        self.result = Result(plan)
        self._server_process = server
        self._server = SteppedServer(self.loop, self.trace, server)
        self._places = [_Place(number + 1) for number in range(plan.num_workers)]
        self._clients: list[ClientProgram] = []
        self._requests: list[Sent] = []
        self._claimed: list[Claimed] = []
        self._is_over = False
        self._restarting: asyncio.Task[None] | None = None

    def run(self) -> Result:
        """Run the world to its end, and audit it."""
        result = self.result
        random.seed(f"{self.plan.seed} shared")
        NotingQueue.claimed = self._claimed
        worker_module.AsyncRequestQueue = NotingQueue  # type: ignore[misc]
        main = self.loop.root.start(self._main())
        gc.disable()  # so that objects end when nothing refers to them, and at no other time
        try:
            self.loop.root.context.copy().run(self.loop.run_until_complete, main)
        except StandstillError as error:
            self._violate("standstill", f"{error}; {self._where_everybody_waits()}")
        finally:
            clock.running = None
            gc.enable()
        result.digest = self.trace.digest
        result.num_requests = len(self._requests)
        result.num_commands = self._server.num_commands.total()
        result.num_callbacks = self.loop.num_callbacks
        result.virtual_seconds = self.loop.now
        self._audit()
        return result

    def close(self) -> None:
        """Drop all objects of the world, without running any more of their code."""
        self.loop.set_exception_handler(lambda loop, context: None)
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.loop.close()
        with patch("sys.unraisablehook", lambda unraisable: None):
            for task in [*asyncio.all_tasks(self.loop)]:
                for _ in range(_MOST_CLOSINGS):
                    with suppress(Exception):
                        task.get_coro().close()
            self.__dict__.clear()
            gc.collect()

    # ------------------------------------------------------------ the course of events

    async def _main(self) -> None:
        self._host = Process(self.loop, HOST)
        self._listen()
        for place in self._places:
            self._start_worker(place)
        self._start_clients()
        for planned in self.plan.faults:
            await asyncio.sleep(planned.at - self.loop.now)
            self._inflict(planned)
        await asyncio.sleep(self.plan.seconds - self.loop.now)
        await self._let_all_end()
        await self._let_all_idle()
        await self._drain_all()

    def _listen(self) -> None:
        self.network.listen(HOST, self._host, self._server.accept)

    def _start_clients(self) -> None:
        for number in range(self.plan.num_clients):
            rng = random.Random(f"{self.plan.seed} client {number}")
            process = Process(self.loop, f"client-{number + 1}", _clock_rate(rng))
            share = self.plan.num_requests // self.plan.num_clients
            requests = process.context.run(_make_requests, process, rng, share)
            self._requests += requests
            client = ClientProgram(process, rng, requests)
            client.start(self.plan.seconds)
            self._clients.append(client)

    def _start_worker(self, place: _Place) -> None:
        place.num_starts += 1
        name = f"worker-{place.number}.{place.num_starts}"
        rng = random.Random(f"{self.plan.seed} {name}")
        process = Process(self.loop, name, _clock_rate(rng))
        place.worker = WorkerProgram(process, rng)
        self.trace.note(process, "starts")
        place.watching = self.loop.root.start(self._watch(place, place.worker))

    async def _watch(self, place: _Place, worker: WorkerProgram) -> None:
        """Wait for the end of a worker. Start a new one in its place."""
        with suppress(Exception):
            await asyncio.wait([worker.main])
        error = worker.main.exception()
        how = f"ends with {error!r}" if error else "ends"
        self.trace.note(worker.process, how)
        if error:
            self._violate("bad exit", f"{worker.process.name} {how}")
        if left := worker.check_idle():
            self._violate("leaked block", f"{worker.process.name}: {left}")
        self._bury(worker)
        if not self._is_over:
            self._start_worker(place)

    def _bury(self, worker: WorkerProgram) -> None:
        worker.process.kill()
        self.network.bury(worker.process)

    async def _let_all_end(self) -> None:
        self.network.heal()
        self.trace.note(self.loop.root, "ends all faults")
        if self._restarting is not None:
            await self._restarting
        began_at = self.loop.now
        done, late = await asyncio.wait(
            [client.main for client in self._clients], timeout=PATIENCE_SECONDS
        )
        self.result.settle_seconds = self.loop.now - began_at
        for task in done:
            task.result()
        if late:
            self._violate("no end", self._where_everybody_waits())

    async def _let_all_idle(self) -> None:
        await asyncio.sleep(IDLE_SECONDS)  # the last requests may be on their way back
        before = self._server.num_commands.copy()
        await asyncio.sleep(IDLE_SECONDS)
        sent = self._server.num_commands - before
        names = {place.worker.process.name for place in self._places if place.worker is not None}
        self.result.violations += check_idle({name: sent[name] for name in names})

    async def _drain_all(self) -> None:
        self._is_over = True
        for place in self._places:
            if place.worker is not None:
                place.worker.stop.set()
        ending = [place.watching for place in self._places if place.watching is not None]
        _, late = await asyncio.wait(ending, timeout=PATIENCE_SECONDS)
        if late:
            self._violate("no drain", self._where_everybody_waits())

    # ------------------------------------------------------------ faults

    def _inflict(self, planned: PlannedFault) -> None:
        self.result.faults[planned.kind] += 1
        match planned.kind:
            case Fault.KILL:
                self._kill(self._choose(self._places, planned), planned.seconds)
            case Fault.DRAIN:
                worker = self._choose(self._places, planned).worker
                if worker is not None:
                    self._note(planned, worker.process)
                    worker.stop.set()
            case Fault.FREEZE:
                worker = self._choose(self._places, planned).worker
                if worker is not None:
                    self._freeze(planned, worker.process)
            case Fault.FREEZE_CLIENT:
                self._freeze(planned, self._choose(self._clients, planned).process)
            case Fault.RESTART:
                if self._server_process.is_running:
                    self._note(planned, self._host)
                    self._restart_server(planned.seconds)
            case Fault.CUT_ONE | Fault.LOSE_REPLY:
                if self.network.links:
                    link = self._choose(self.network.links, planned)
                    self._note(planned, link.near.process)
                    if planned.kind is Fault.CUT_ONE:
                        link.cut()
                    else:
                        link.swallows_replies = True
            case _:
                self._disturb(planned, self._choose(self._processes(), planned))

    def _disturb(self, planned: PlannedFault, process: Process) -> None:
        self._note(planned, process)
        match planned.kind:
            case Fault.CUT:
                for link in self.network.of(process):
                    link.cut()
            case Fault.HOLD:
                self.network.hold(process, planned.seconds)
            case Fault.REFUSE:
                self.network.refuse(process, planned.seconds)
            case Fault.JUMP:
                process.wall_ahead += (planned.choice - 0.5) * 100

    def _kill(self, place: _Place, seconds: float) -> None:
        worker, place.worker = place.worker, None
        if worker is None:  # it has not come back yet
            return
        self.trace.note(worker.process, "is killed")
        assert place.watching is not None
        place.watching.cancel()
        self._bury(worker)

        async def come_back() -> None:
            await asyncio.sleep(seconds)
            if not self._is_over:
                self._start_worker(place)

        place.watching = self.loop.root.start(come_back())

    def _restart_server(self, seconds: float) -> None:
        self._server_process.kill()
        self.network.unlisten(HOST)

        async def come_back() -> None:
            await asyncio.sleep(seconds)
            self._server_process.set_time(EPOCH + self.loop.now)
            self._server_process.start()
            self._listen()

        self._restarting = self.loop.root.start(come_back())

    def _freeze(self, planned: PlannedFault, process: Process) -> None:
        self._note(planned, process)
        process.pause()
        self.loop.at(self.loop.now + planned.seconds, self.loop.root, process.go_on)

    def _note(self, planned: PlannedFault, process: Process) -> None:
        self.trace.note(process, f"suffers: {planned.kind} ({planned.seconds:.3f} s)")

    def _processes(self) -> list[Process]:
        workers = [place.worker.process for place in self._places if place.worker is not None]
        return [*workers, *(client.process for client in self._clients)]

    def _choose(self, items: list[Any], planned: PlannedFault) -> Any:
        return items[int(planned.choice * len(items))]

    # ------------------------------------------------------------ the audit

    def _audit(self) -> None:
        result = self.result
        for failure in self.loop.failures:
            self._violate("unhandled", failure)
        streams = [stream for client in self._clients for stream in client.timed.streams]
        result.num_carried_on = num_carried_on(streams)
        seen = [stream.seen for stream in streams]
        with redis.Redis(unix_socket_path=str(self._server_process.path)) as connection:
            snapshot = take_snapshot(connection, Keys(QUEUE))
        result.violations += audit(self._requests, seen, {QUEUE: snapshot}, {}, self._claimed)
        if not self.plan.faults:
            for client in self._clients:
                result.violations += check_calm(client.timed, snapshot)

    def _violate(self, rule: str, seen: str) -> None:
        self.result.violations.append(Violation(rule, "", seen))

    def _where_everybody_waits(self) -> str:
        return "; ".join(_waits(self.loop))


def _clock_rate(rng: random.Random) -> float:
    return 1 + rng.choice([0.0, 0.0001, 0.01]) * (rng.random() - 0.5)


def _make_requests(process: Process, rng: random.Random, count: int) -> list[Sent]:
    """Makes requests in the context of a process, whose clock and entropy their ids have."""
    before, clock.running = clock.running, process
    requests = [make_request(QUEUE, rng) for _ in range(count)]
    clock.running = before
    for request in requests:
        request.fields["max_tokens"] = rng.randint(1, _MOST_TOKENS)
    return requests


def _waits(loop: SimulatedLoop) -> Iterator[str]:
    """Yields where each task of a living process waits."""
    tasks = [task for task in asyncio.all_tasks(loop) if isinstance(task, SimulatedTask)]
    for task in sorted(tasks, key=hash):
        if task.process.is_alive and (stack := task.get_stack(limit=1)):
            at = f"{Path(stack[-1].f_code.co_filename).name}:{stack[-1].f_lineno}"
            yield f"{task.process.name} {task.get_coro().__qualname__} at {at}"


def run_world(
    plan: Plan, library: Path, story: TextIO | None = None, server_kind: str = ""
) -> Result:
    """Run a world with a new server of this kind."""
    with (
        tempfile.TemporaryDirectory(prefix="world-") as folder,
        ServerProcess(Path(folder), library, server_kind) as server,
    ):
        world = World(plan, server, story)
        try:
            return world.run()
        finally:
            world.close()
