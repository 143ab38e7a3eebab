"""The places of a world: workers, gateways, jobs and clients, and the requests of the clients. A
place runs one program at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.programs.chaos.audit.records import Sent
from tests.programs.simulation.http_clients import HttpClientProgram, HttpStream, plan_stream
from tests.programs.simulation.loop import SimulatedTask
from tests.programs.simulation.places import Place, Program, Site
from tests.programs.simulation.plan import Plan
from tests.programs.simulation.processes import MUCH_ROOM, SIZES, ClientProgram, Work, WorkerProgram
from tests.programs.simulation.watch import Ask, check_given_back
from tests.programs.simulation.workload import make_again, make_requests

_FEW_REQUESTS = 40
"""Most requests of a world whose workers may have few slots, so that all requests end in time."""


class Fleet:
    """All places of a world, and the records of their clients. `violate` reports a violation, and
    `ask` sends commands to the server."""

    def __init__(
        self,
        plan: Plan,
        site: Site,
        folder: Path,
        violate: Callable[[str, str], None],
        ask: Ask,
    ) -> None:
        self._plan = plan
        self._site = site
        self._folder = folder
        self._violate = violate
        self._ask = ask
        self.requests: list[Sent] = []
        self.work: list[Work] = []
        """The work of clients that use the queue."""
        self.streams: list[HttpStream] = []
        """The answers that clients of gateways read."""
        sizes = SIZES if plan.num_requests <= _FEW_REQUESTS else SIZES[:1]
        if plan.affinity_ms:
            sizes = (*sizes, MUCH_ROOM)
        work = partial(WorkerProgram, notes=site.notes, lease_ms=plan.lease_ms, sizes=sizes)
        self.workers = [
            Place(site, f"worker-{number + 1}", work, self._check_worker)
            for number in range(plan.num_workers)
        ]
        self.gateways = self._make_gateways() if plan.num_gateways else []
        self.jobs = self._make_jobs() if plan.num_leaders else []
        self.servants: list[Place[Any]] = [*self.workers, *self.gateways, *self.jobs]
        """The places of processes that never end by themselves."""
        self.queue_clients: list[Place[ClientProgram]] = []
        self.http_clients: list[Place[Any]] = []
        self._make_clients()

    @property
    def clients(self) -> list[Place[Any]]:
        return [*self.queue_clients, *self.http_clients]

    @property
    def places(self) -> list[Place[Any]]:
        return [*self.servants, *self.clients]

    def close(self) -> None:
        """End the threads of blocking code."""
        for place in self.jobs:
            for program in place.programs:
                program.thread.close()

    # Only some worlds need the modules of gateways and jobs, whose import takes a second.

    def _make_gateways(self) -> list[Place[Any]]:
        from tests.programs.simulation.gateways import GatewayProgram, NumberedProtocol

        NumberedProtocol.num_made = 0
        start = partial(GatewayProgram, folder=self._folder)
        names = [f"gateway-{number + 1}" for number in range(self._plan.num_gateways)]
        return [Place(self._site, name, start, self._check_exit) for name in names]

    def _make_jobs(self) -> list[Place[Any]]:
        from tests.programs.simulation.jobs import LEAD, UPKEEP, JobsProgram

        names = [f"leader-{number + 1}" for number in range(self._plan.num_leaders)]
        program = partial(JobsProgram, folder=self._folder, lease_ms=self._plan.lease_ms)
        lead, upkeep = partial(program, work=LEAD), partial(program, work=UPKEEP)
        places = [Place(self._site, name, lead, self._check_exit) for name in names]
        return [*places, Place(self._site, "upkeep", upkeep, self._check_exit)]

    def _make_clients(self) -> None:
        plan, root = self._plan, self._site.loop.root
        rng = random.Random(f"{plan.seed} requests")
        num_shares = plan.num_clients + bool(plan.num_gateways)
        share = max(1, plan.num_requests // num_shares)
        for number in range(plan.num_clients):
            requests = root.context.run(make_requests, root, rng, share)
            self.requests += requests
            seconds = plan.seconds * rng.choice([1.0, 1.0, 0.1])  # some send all at once
            self.work.append(Work([*requests], seconds, self._site.notes))
            start = partial(ClientProgram, work=self.work[-1])
            name = f"client-{number + 1}"
            self.queue_clients.append(Place(self._site, name, start, self._check_own_exit))
        if plan.num_gateways:
            requests = root.context.run(make_requests, root, rng, share)
            self.requests += requests
            make = self._starting_over_http(requests, rng)
            self.http_clients.append(
                Place(self._site, "http-client", make, self._check_own_exit, ends_once=True)
            )

    def _starting_over_http(self, requests: list[Sent], rng: random.Random) -> Callable[..., Any]:
        is_calm, seconds = not self._plan.faults, self._plan.seconds
        self.streams = [plan_stream(request, rng, is_calm) for request in requests]
        hosts = [f"gateway-{number + 1}" for number in range(self._plan.num_gateways)]
        return partial(HttpClientProgram, streams=self.streams, hosts=hosts, seconds=seconds)

    def send_again(self, seconds: float) -> None:
        """Let the clients of the queue send more requests within `seconds`."""
        root = self._site.loop.root
        rng = random.Random(f"{self._plan.seed} requests again")
        for place, work in zip(self.queue_clients, self.work, strict=True):
            requests = root.context.run(make_again, root, rng)
            self.requests += requests
            work.requests += requests
            work.seconds = seconds
            work.all_over.clear()
            if place.program is not None:
                place.program.serve_more()

    # ------------------------------------------------------------ ends

    def _check_exit(self, program: Program, error: BaseException | None) -> None:
        if error:
            self._violate("bad exit", f"{program.process.name} ends with {error!r}")

    def _check_own_exit(self, program: Program, error: BaseException | None) -> None:
        """Checks the end of a process whose tasks and connections are all of promptq."""
        self._check_exit(program, error)
        process = program.process
        tasks = [
            task
            for task in asyncio.all_tasks(self._site.loop)
            if isinstance(task, SimulatedTask) and task.process is process
        ]
        if tasks:
            names = ", ".join(sorted(task.get_coro().__qualname__ for task in tasks))
            self._violate("tasks left", f"{process.name}: {names}")
        near = [link.near for link in self._site.network.links if link.near.process is process]
        if num_left := sum(not end.is_over for end in near):
            self._violate("connections left", f"{process.name}: {num_left}")

    def _check_worker(self, worker: WorkerProgram, error: BaseException | None) -> None:
        self._check_own_exit(worker, error)
        if left := worker.check_idle():
            self._violate("leaked block", f"{worker.process.name}: {left}")
        if worker.engine is not None and worker.engine.num_late_outputs:
            self._violate("late cancel", f"{worker.process.name} computes cancelled sequences")
        name, now = worker.process.name, self._site.loop.now
        if not self._site.notes.is_disturbed(name, worker.stops_at or 0.0, now):
            for violation in check_given_back(self._ask, worker):
                self._violate(violation.rule, violation.seen)
