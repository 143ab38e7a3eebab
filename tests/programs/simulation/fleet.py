"""The places of a world: workers, gateways, jobs and clients, and the requests of the clients."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.programs.chaos.audit.records import Sent
from tests.programs.chaos.requests import make_request
from tests.programs.simulation import clock
from tests.programs.simulation.http_clients import HttpClientProgram, HttpStream, plan_stream
from tests.programs.simulation.loop import Process
from tests.programs.simulation.places import Place, Program, Site
from tests.programs.simulation.plan import Plan
from tests.programs.simulation.processes import QUEUE, ClientProgram, Work, WorkerProgram

_MOST_TOKENS = 20


class Fleet:
    """All places of a world, and what their clients record. `violate` reports a violation."""

    def __init__(
        self, plan: Plan, site: Site, folder: Path, violate: Callable[[str, str], None]
    ) -> None:
        self._plan = plan
        self._site = site
        self._folder = folder
        self._violate = violate
        self.requests: list[Sent] = []
        self.work: list[Work] = []
        """The work of clients that use the queue."""
        self.streams: list[HttpStream] = []
        """The answers that clients of gateways read."""
        self.workers = [
            Place(site, f"worker-{number + 1}", WorkerProgram, self._check_worker)
            for number in range(plan.num_workers)
        ]
        self.gateways = self._make_gateways() if plan.num_gateways else []
        self.jobs = self._make_jobs() if plan.num_leaders else []
        self.servants: list[Place[Any]] = [*self.workers, *self.gateways, *self.jobs]
        """The places of processes that never end by themselves."""
        self.clients: list[Place[Any]] = self._make_clients()

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
        lead = partial(JobsProgram, work=LEAD, folder=self._folder)
        upkeep = partial(JobsProgram, work=UPKEEP, folder=self._folder)
        places = [Place(self._site, name, lead, self._check_exit) for name in names]
        return [*places, Place(self._site, "upkeep", upkeep, self._check_exit)]

    def _make_clients(self) -> list[Place[Any]]:
        plan, root = self._plan, self._site.loop.root
        rng = random.Random(f"{plan.seed} requests")
        num_shares = plan.num_clients + bool(plan.num_gateways)
        made: list[Place[Any]] = []
        for number in range(num_shares):
            share = max(1, plan.num_requests // num_shares)
            requests = root.context.run(_make_requests, root, rng, share)
            self.requests += requests
            if number < plan.num_clients:
                name, start = f"client-{number + 1}", self._starting(requests)
            else:
                name, start = "http-client", self._starting_over_http(requests, rng)
            made.append(Place(self._site, name, start, self._check_exit, ends_once=True))
        return made

    def _starting(self, requests: list[Sent]) -> Callable[..., Any]:
        work = Work(requests=requests, seconds=self._plan.seconds)
        self.work.append(work)
        return partial(ClientProgram, work=work)

    def _starting_over_http(self, requests: list[Sent], rng: random.Random) -> Callable[..., Any]:
        is_calm, seconds = not self._plan.faults, self._plan.seconds
        self.streams = [plan_stream(request, rng, is_calm) for request in requests]
        hosts = [f"gateway-{number + 1}" for number in range(self._plan.num_gateways)]
        return partial(HttpClientProgram, streams=self.streams, hosts=hosts, seconds=seconds)

    def _check_exit(self, program: Program, error: BaseException | None) -> None:
        if error:
            self._violate("bad exit", f"{program.process.name} ends with {error!r}")

    def _check_worker(self, worker: WorkerProgram, error: BaseException | None) -> None:
        self._check_exit(worker, error)
        if left := worker.check_idle():
            self._violate("leaked block", f"{worker.process.name}: {left}")
        if worker.engine is not None and worker.engine.num_late_outputs:
            self._violate("late cancel", f"{worker.process.name} computes cancelled sequences")


def _make_requests(process: Process, rng: random.Random, count: int) -> list[Sent]:
    """Makes requests in the context of a process, whose clock and entropy their ids have."""
    before, clock.running = clock.running, process
    requests = [make_request(QUEUE, rng) for _ in range(count)]
    clock.running = before
    for request in requests:
        request.fields["max_tokens"] = rng.randint(1, _MOST_TOKENS)
    return requests
