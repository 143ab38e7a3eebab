"""A world: its plan, made from a seed, its run, and its audit."""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
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
from tests.programs.chaos.audit.records import Claimed
from tests.programs.simulation import clock
from tests.programs.simulation.auditor import (
    IDLE_SECONDS,
    PATIENCE_SECONDS,
    check_calm,
    check_idle,
    num_carried_on,
)
from tests.programs.simulation.cut_off import check_cut_off
from tests.programs.simulation.faults import Faults
from tests.programs.simulation.fleet import Fleet
from tests.programs.simulation.http_audit import check_http
from tests.programs.simulation.http_clients import (
    find_ids,
)
from tests.programs.simulation.jobs_audit import (
    SETTLE_SECONDS,
    check_acts,
    check_leaders,
    check_upkeep,
)
from tests.programs.simulation.loop import (
    EPOCH,
    SimulatedLoop,
    SimulatedTask,
    StandstillError,
)
from tests.programs.simulation.network import Network
from tests.programs.simulation.order_audit import check_order
from tests.programs.simulation.places import Place, Site, running
from tests.programs.simulation.plan import Fault, Plan
from tests.programs.simulation.processes import (
    QUEUE,
    NotingQueue,
)
from tests.programs.simulation.server import ServerProcess, SteppedServer
from tests.programs.simulation.trace import Trace

_MOST_CALLBACKS = 1_000_000
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
        self._server = SteppedServer(self.network, server)
        self._site = Site(plan.seed, self.loop, self.network, self.trace)
        files = server.folder / "files"
        self._fleet = Fleet(plan, self._site, files, self._violate)
        self._faults = Faults(self._site, self._fleet, self._server)
        self._claimed: list[Claimed] = []

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
        result.num_requests = len(self._fleet.requests)
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
        self._fleet.close()
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
        self._server.listen()
        for place in self._fleet.places:
            place.start()
        for planned in self.plan.faults:
            await asyncio.sleep(planned.at - self.loop.now)
            self.result.faults[planned.kind] += 1
            self._faults.inflict(planned)
        await asyncio.sleep(self.plan.seconds - self.loop.now)
        await self._let_all_end()
        await self._let_all_idle()
        await self._drain_all()

    async def _let_all_end(self) -> None:
        self.network.heal()
        self.trace.note(self.loop.root, "ends all faults")
        if self._server.restarting is not None:
            await self._server.restarting
        began_at = self.loop.now
        if not await self._all_over(self._fleet.clients):
            self._violate("no end", self._where_everybody_waits())
        self.result.settle_seconds = self.loop.now - began_at

    async def _let_all_idle(self) -> None:
        if self._fleet.jobs:
            await asyncio.sleep(SETTLE_SECONDS)
            self._check_jobs()
        await asyncio.sleep(IDLE_SECONDS)  # the last requests may be on their way back
        before = self._server.num_commands.copy()
        await asyncio.sleep(IDLE_SECONDS)
        sent = self._server.num_commands - before
        names = {process.name for process in running(self._fleet.workers)}
        self.result.violations += check_idle({name: sent[name] for name in names})

    def _check_jobs(self) -> None:
        self._server_process.set_time(EPOCH + self.loop.now)
        with self._connected() as connection:
            seen: Any = connection.hget(Keys(QUEUE).upkeep, "seen")
        seen_at = None if seen is None else int(seen) / 1000 - EPOCH
        self.result.violations += check_upkeep(seen_at, self.loop.now)

    async def _drain_all(self) -> None:
        self._site.is_over = True
        for place in self._fleet.servants:
            place.drain()
        if not await self._all_over(self._fleet.servants):
            self._violate("no drain", self._where_everybody_waits())

    async def _all_over(self, places: Iterable[Place[Any]]) -> bool:
        """Returns whether the programs of all places end in time."""
        ending = [asyncio.create_task(place.until_over()) for place in places]
        _, late = await asyncio.wait(ending, timeout=PATIENCE_SECONDS)
        return not late

    # ------------------------------------------------------------ the audit

    def _audit(self) -> None:
        result = self.result
        for failure in self.loop.failures:
            self._violate("unhandled", failure)
        streams = [stream for work in self._fleet.work for stream in work.streams]
        whole = [stream for stream in streams if not stream.is_cut_off]
        result.num_carried_on = num_carried_on(streams)
        seen = [stream.seen for stream in whole]
        with self._connected() as connection:
            snapshot = take_snapshot(connection, Keys(QUEUE))
        result.violations += check_leaders(self._server.holds)
        for name in _OF_JOBS:
            snapshot.keys.pop(name, None)
        find_ids(self._fleet.streams, snapshot)
        over_http = {stream.request.request_id for stream in self._fleet.streams}
        result.violations += [
            violation
            for violation in audit(self._fleet.requests, seen, {QUEUE: snapshot}, {}, self._claimed)
            if violation.rule != "unseen" or violation.request_id not in over_http
        ]
        result.violations += check_cut_off(self._fleet.requests, streams)
        result.violations += check_http(self._fleet.streams, snapshot, self.is_calm)
        if self.is_calm:
            result.violations += check_acts(self._server.holds, self._server.acts)
            result.violations += check_order(self._fleet.requests, snapshot)
            for work in self._fleet.work:
                result.violations += check_calm(work, snapshot)

    def _connected(self) -> redis.Redis:
        """Returns a client of the server that does not pass the network."""
        return redis.Redis(unix_socket_path=str(self._server_process.path))

    def _violate(self, rule: str, seen: str) -> None:
        self.result.violations.append(Violation(rule, "", seen))

    def _where_everybody_waits(self) -> str:
        return "; ".join(_waits(self.loop))


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
