"""A world: its plan, made from a seed, its run, and its audit."""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
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
from tests.programs.simulation.cut_off import check_cut_off
from tests.programs.simulation.gateways import GatewayProgram
from tests.programs.simulation.http_audit import check_http
from tests.programs.simulation.http_clients import (
    HttpClientProgram,
    HttpStream,
    find_ids,
    plan_stream,
)
from tests.programs.simulation.jobs import LEAD, UPKEEP, JobsProgram
from tests.programs.simulation.jobs_audit import SETTLE_SECONDS, check_leaders, check_upkeep
from tests.programs.simulation.loop import (
    EPOCH,
    Process,
    SimulatedLoop,
    SimulatedTask,
    StandstillError,
)
from tests.programs.simulation.network import Network
from tests.programs.simulation.order_audit import check_order
from tests.programs.simulation.places import Place, Program, Site, running
from tests.programs.simulation.plan import Fault, Plan, PlannedFault
from tests.programs.simulation.processes import (
    HOST,
    QUEUE,
    ClientProgram,
    NotingQueue,
    Work,
    WorkerProgram,
)
from tests.programs.simulation.server import ServerProcess, SteppedServer
from tests.programs.simulation.trace import Trace

_MOST_CALLBACKS = 1_000_000
_MOST_TOKENS = 20
_OF_JOBS = ("upkeep", "statistics", "statistics:minutes")
"""Keys of which each queue has one, if it has jobs."""
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
        self._site = Site(plan.seed, self.loop, self.network, self.trace)
        self._workers = [
            Place(self._site, f"worker-{number + 1}", WorkerProgram, self._check_worker)
            for number in range(plan.num_workers)
        ]
        self._gateways = [
            Place(self._site, f"gateway-{number + 1}", self._start_gateway, self._check_exit)
            for number in range(plan.num_gateways)
        ]
        files = self._server_process.folder / "files"
        leader = partial(JobsProgram, work=LEAD, folder=files)
        names = [f"leader-{number + 1}" for number in range(plan.num_leaders)]
        self._jobs = [Place(self._site, name, leader, self._check_exit) for name in names]
        if names:
            upkeep = partial(JobsProgram, work=UPKEEP, folder=files)
            self._jobs.append(Place(self._site, "upkeep", upkeep, self._check_exit))
        self._clients: list[Place[ClientProgram]] = []
        self._http_clients: list[Place[HttpClientProgram]] = []
        self._work: list[Work] = []
        self._streams: list[HttpStream] = []
        self._requests: list[Sent] = []
        self._claimed: list[Claimed] = []
        self._restarting: asyncio.Task[None] | None = None

    @property
    def is_calm(self) -> bool:
        """Whether the world has no faults."""
        return not self.plan.faults

    def run(self) -> Result:
        """Run the world to its end, and audit it."""
        result = self.result
        random.seed(f"{self.plan.seed} shared")
        NotingQueue.claimed = self._claimed
        worker_module.AsyncRequestQueue = NotingQueue  # type: ignore[misc]
        with self._connected() as connection:
            connection.hset(Keys(QUEUE).config, "aging_ms", self.plan.aging_ms)
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
        for place in self._jobs:
            for program in place.programs:
                program.thread.close()
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
        for place in self._servants:
            place.start()
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
        rng, root = random.Random(f"{self.plan.seed} requests"), self.loop.root
        num_shares = self.plan.num_clients + bool(self.plan.num_gateways)
        for number in range(num_shares):
            share = max(1, self.plan.num_requests // num_shares)
            requests = root.context.run(_make_requests, root, rng, share)
            self._requests += requests
            if number < self.plan.num_clients:
                self._start_client(number, Work(requests=requests, seconds=self.plan.seconds))
            else:
                self._start_http_client(
                    [plan_stream(request, rng, self.is_calm) for request in requests]
                )

    def _start_client(self, number: int, work: Work) -> None:
        self._work.append(work)
        start = partial(ClientProgram, work=work)
        place = Place(self._site, f"client-{number + 1}", start, self._check_exit, ends_once=True)
        place.start()
        self._clients.append(place)

    def _start_http_client(self, streams: list[HttpStream]) -> None:
        self._streams = streams
        hosts = [f"gateway-{number + 1}" for number in range(self.plan.num_gateways)]
        start = partial(HttpClientProgram, streams=streams, hosts=hosts, seconds=self.plan.seconds)
        place = Place(self._site, "http-client", start, self._check_exit, ends_once=True)
        place.start()
        self._http_clients.append(place)

    def _start_gateway(self, process: Process, _rng: random.Random) -> GatewayProgram:
        return GatewayProgram(
            process, process.name.partition(".")[0], self._server_process.folder / "files"
        )

    def _check_exit(self, program: Program, error: BaseException | None) -> None:
        if error:
            self._violate("bad exit", f"{program.process.name} ends with {error!r}")

    def _check_worker(self, worker: WorkerProgram, error: BaseException | None) -> None:
        self._check_exit(worker, error)
        if left := worker.check_idle():
            self._violate("leaked block", f"{worker.process.name}: {left}")
        if worker.engine is not None and worker.engine.num_late_outputs:
            self._violate("late cancel", f"{worker.process.name} computes cancelled sequences")

    async def _let_all_end(self) -> None:
        self.network.heal()
        self.trace.note(self.loop.root, "ends all faults")
        if self._restarting is not None:
            await self._restarting
        began_at = self.loop.now
        if not await self._all_over([*self._clients, *self._http_clients]):
            self._violate("no end", self._where_everybody_waits())
        self.result.settle_seconds = self.loop.now - began_at

    async def _let_all_idle(self) -> None:
        if self._jobs:
            await asyncio.sleep(SETTLE_SECONDS)
            self._check_jobs()
        await asyncio.sleep(IDLE_SECONDS)  # the last requests may be on their way back
        before = self._server.num_commands.copy()
        await asyncio.sleep(IDLE_SECONDS)
        sent = self._server.num_commands - before
        names = {process.name for process in running(self._workers)}
        self.result.violations += check_idle({name: sent[name] for name in names})

    def _check_jobs(self) -> None:
        self._server_process.set_time(EPOCH + self.loop.now)
        with self._connected() as connection:
            seen: Any = connection.hget(Keys(QUEUE).upkeep, "seen")
        seen_at = None if seen is None else int(seen) / 1000 - EPOCH
        self.result.violations += check_upkeep(seen_at, self.loop.now)

    async def _drain_all(self) -> None:
        self._site.is_over = True
        for place in self._servants:
            place.drain()
        if not await self._all_over(self._servants):
            self._violate("no drain", self._where_everybody_waits())

    async def _all_over(self, places: Iterable[Place[Any]]) -> bool:
        """Returns whether the programs of all places end in time."""
        ending = [asyncio.create_task(place.until_over()) for place in places]
        _, late = await asyncio.wait(ending, timeout=PATIENCE_SECONDS)
        return not late

    # ------------------------------------------------------------ faults

    def _inflict(self, planned: PlannedFault) -> None:
        self.result.faults[planned.kind] += 1
        match planned.kind:
            case Fault.KILL | Fault.KILL_GATEWAY | Fault.KILL_CLIENT | Fault.KILL_JOBS:
                self._choose(self._places_of(planned.kind), planned).kill(planned.seconds)
            case Fault.DRAIN | Fault.DRAIN_GATEWAY:
                place = self._choose(self._places_of(planned.kind), planned)
                for process in running([place]):
                    self._note(planned, process)
                place.drain()
            case Fault.FREEZE | Fault.FREEZE_GATEWAY | Fault.FREEZE_CLIENT | Fault.FREEZE_JOBS:
                for process in running([self._choose(self._places_of(planned.kind), planned)]):
                    self._freeze(planned, process)
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
                if processes := running(self._all_places):
                    self._disturb(planned, self._choose(processes, planned))

    def _places_of(self, kind: Fault) -> Sequence[Place[Any]]:
        match kind:
            case Fault.KILL_CLIENT | Fault.FREEZE_CLIENT:
                return [*self._clients, *self._http_clients]
            case Fault.KILL_GATEWAY | Fault.DRAIN_GATEWAY | Fault.FREEZE_GATEWAY:
                return self._gateways or self._workers  # a shrunk plan may lack gateways
            case Fault.KILL_JOBS | Fault.FREEZE_JOBS:
                return self._jobs or self._workers
        return self._workers

    @property
    def _servants(self) -> list[Place[Any]]:
        """The places of processes that never end by themselves."""
        return [*self._workers, *self._gateways, *self._jobs]

    @property
    def _all_places(self) -> list[Place[Any]]:
        return [*self._servants, *self._clients, *self._http_clients]

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

    def _choose(self, items: Sequence[Any], planned: PlannedFault) -> Any:
        return items[int(planned.choice * len(items))]

    # ------------------------------------------------------------ the audit

    def _audit(self) -> None:
        result = self.result
        for failure in self.loop.failures:
            self._violate("unhandled", failure)
        streams = [stream for work in self._work for stream in work.streams]
        whole = [stream for stream in streams if not stream.is_cut_off]
        result.num_carried_on = num_carried_on(streams)
        seen = [stream.seen for stream in whole]
        with self._connected() as connection:
            snapshot = take_snapshot(connection, Keys(QUEUE))
        result.violations += check_leaders(self._server.holds)
        for name in _OF_JOBS:
            snapshot.keys.pop(name, None)
        find_ids(self._streams, snapshot)
        over_http = {stream.request.request_id for stream in self._streams}
        result.violations += [
            violation
            for violation in audit(self._requests, seen, {QUEUE: snapshot}, {}, self._claimed)
            if violation.rule != "unseen" or violation.request_id not in over_http
        ]
        result.violations += check_cut_off(self._requests, streams)
        result.violations += check_http(self._streams, snapshot, self.is_calm)
        if self.is_calm:
            result.violations += check_order(self._requests, snapshot)
            for work in self._work:
                result.violations += check_calm(work, snapshot)

    def _connected(self) -> redis.Redis:
        """Returns a client of the server that does not pass the network."""
        return redis.Redis(unix_socket_path=str(self._server_process.path))

    def _violate(self, rule: str, seen: str) -> None:
        self.result.violations.append(Violation(rule, "", seen))

    def _where_everybody_waits(self) -> str:
        return "; ".join(_waits(self.loop))


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
