"""A world: its plan, made from a seed, its run, and its audit."""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

import redis
import redis.asyncio
import redis.utils

from promptq.shared.protocol.keys import Keys
from promptq.worker.serve import worker as worker_module
from tests.programs.chaos.audit.auditor import Violation, audit
from tests.programs.chaos.audit.outcome import take_snapshot
from tests.programs.simulation import clock
from tests.programs.simulation.auditor import (
    PATIENCE_SECONDS,
    check_times,
    lives,
    num_carried_on,
)
from tests.programs.simulation.causes import check_causes
from tests.programs.simulation.cut_off import check_cut_off
from tests.programs.simulation.faults import Faults
from tests.programs.simulation.fleet import Fleet
from tests.programs.simulation.http_audit import check_http
from tests.programs.simulation.http_clients import find_ids
from tests.programs.simulation.jobs_audit import (
    SETTLE_SECONDS,
    check_acts,
    check_leaders,
    check_upkeep,
)
from tests.programs.simulation.loop import EPOCH, SimulatedLoop, SimulatedTask, StandstillError
from tests.programs.simulation.network import Network
from tests.programs.simulation.order_audit import check_order, check_scores
from tests.programs.simulation.patience_audit import check_patience
from tests.programs.simulation.places import Place, Site, running
from tests.programs.simulation.plan import Fault, Plan
from tests.programs.simulation.processes import QUEUE, NotingQueue, WorkerProgram
from tests.programs.simulation.server import ServerProcess, SteppedServer
from tests.programs.simulation.trace import Trace
from tests.programs.simulation.watch import (
    IDLE_SECONDS,
    LOOK_SECONDS,
    Watch,
    check_idle,
    check_listed,
    check_statistics,
)
from tests.programs.traces.recorder import Recorder

_AGAIN_SECONDS = 0.5
_REQUESTS_A_SECOND = 20
"""The least number of requests that a worker of any size serves in a second."""
_DRAIN_SECONDS = 2.0
"""Seconds within which a worker without requests ends."""
_OF_JOBS = ("upkeep", "statistics", "statistics:minutes")
"""Keys of which each queue has one, if it has jobs."""
_MOST_CLOSINGS = 5  # each ends one more `finally` that waits

# redis-py reads its metadata from the disk for each connection.
redis.utils.get_lib_version = cache(redis.utils.get_lib_version)


async def _record_nothing(*_args: Any, **_options: Any) -> None:
    """Replaces functions of redis-py that find out for each command that telemetry is off."""


for _module in (redis.asyncio.client, redis.asyncio.connection):
    for _name in [name for name in vars(_module) if name.startswith("record_")]:
        setattr(_module, _name, _record_nothing)


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
    """One world: its processes, and the faults that happen to them."""

    most_callbacks = 1_000_000
    """The number of callbacks after which the world counts as standing still."""

    def __init__(
        self, plan: Plan, server: ServerProcess, story: TextIO | None, recorder: Recorder | None
    ) -> None:
        self.plan = plan
        self.loop = SimulatedLoop(str(plan.seed), self.most_callbacks)
        self.trace = Trace(self.loop, story)
        self.network = Network(self.loop, self.trace)
        self.result = Result(plan)
        self._server_process = server
        self._server = SteppedServer(self.network, server, recorder)
        self._site = Site(plan.seed, self.loop, self.network, self.trace)
        self._notes = self._site.notes
        files = server.folder / "files"
        self._fleet = Fleet(plan, self._site, files, self._violate, server.ask)
        self._faults = Faults(self._site, self._fleet, self._server)
        self._watcher = Watch(server.ask, plan.lease_ms, plan.affinity_ms)

    def run(self) -> Result:
        """Run the world to its end, and audit it."""
        result = self.result
        random.seed(f"{self.plan.seed} shared")
        NotingQueue.notes = self._notes
        worker_module.AsyncRequestQueue = NotingQueue  # type: ignore[misc]
        self._server.configure(Keys(QUEUE), self.plan.config)
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
        gc.freeze()  # so that the next world's end does not search modules

    # ------------------------------------------------------------ the course of events

    async def _main(self) -> None:
        self._server.listen()
        for place in self._fleet.places:
            place.start()
        self.loop.root.start(self._look())
        if not self.plan.faults:
            self._notes.calm_from = 0.0
        for planned in self.plan.faults:
            await asyncio.sleep(planned.at - self.loop.now)
            self.result.faults[planned.kind] += 1
            self._faults.inflict(planned)
        await asyncio.sleep(self.plan.seconds - self.loop.now)
        await self._let_all_end()
        await self._let_all_idle()
        await self._send_again()
        await self._drain_all()

    async def _look(self) -> None:
        """Look at the world until it ends."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            answers = self._server_process.is_running
            calls = {
                "connections": self.network.num_connects,
                "refused scripts": self._server.num_refused,
            }
            self._watcher.look(
                self.loop.now,
                self._workers,
                running(self._fleet.places),
                calls,
                is_calm=answers and self._notes.is_calm(self.loop.now),
                is_quiet=answers and self._notes.is_quiet(self.loop.now),
            )

    async def _let_all_end(self) -> None:
        self.network.heal()
        self._server.full_until = 0.0
        self.trace.note(self.loop.root, "ends all faults")
        if self._server.restarting is not None:
            await self._server.restarting
        began_at = self.loop.now
        await self._wait_for_clients()
        self.result.settle_seconds = self.loop.now - began_at

    async def _wait_for_clients(self) -> None:
        over = [work.all_over.wait() for work in self._fleet.work]
        over_http = [place.until_over() for place in self._fleet.http_clients]
        work_seconds = self.plan.num_requests / (_REQUESTS_A_SECOND * self.plan.num_workers)
        if not await _all_end([*over, *over_http], PATIENCE_SECONDS + work_seconds):
            self._violate("no end", self._where_everybody_waits())

    async def _let_all_idle(self) -> None:
        """Wait until all workers are back, and have nothing to do."""
        began_at = self.loop.now
        while not all(place.program and place.program.ready_at for place in self._fleet.workers):
            await asyncio.sleep(LOOK_SECONDS)
            if self.loop.now > began_at + PATIENCE_SECONDS:
                self._violate("no worker", self._where_everybody_waits())
                return
        if self._fleet.jobs:
            await asyncio.sleep(SETTLE_SECONDS)
            self._check_jobs()
        await asyncio.sleep(IDLE_SECONDS)  # the last requests may be on their way back
        before = self._server.num_commands.copy()
        await asyncio.sleep(IDLE_SECONDS)
        sent = self._server.num_commands - before
        self.result.violations += check_idle(self._server_process.ask, sent, self._workers)

    def _check_jobs(self) -> None:
        [seen] = self._server_process.ask(("HGET", Keys(QUEUE).upkeep, "seen"))
        seen_at = None if seen is None else int(seen) / 1000 - EPOCH
        self.result.violations += check_upkeep(seen_at, self.loop.now)

    async def _send_again(self) -> None:
        """Send more requests, now that the faults have no effect any longer. Drain a worker."""
        if self._notes.calm_from is None:
            self._notes.calm_from = self.loop.now
        self._fleet.send_again(_AGAIN_SECONDS)
        await asyncio.sleep(_AGAIN_SECONDS)
        if len(self._workers) > 1:  # with another one that goes on, no request waits for the drain
            max(self._workers, key=lambda worker: worker.num_held).drain()
        await self._wait_for_clients()

    async def _drain_all(self) -> None:
        self._site.is_over = True
        drained = self._workers
        for place in self._fleet.places:
            place.drain()
        quick: list[Place[Any]] = [*self._fleet.workers, *self._fleet.queue_clients]
        slow = [*self._fleet.gateways, *self._fleet.jobs]
        ends = await _all_end([place.until_over() for place in quick], _DRAIN_SECONDS)
        if not (ends and await _all_end([place.until_over() for place in slow], PATIENCE_SECONDS)):
            self._violate("no drain", self._where_everybody_waits())
        self.result.violations += check_listed(self._server_process.ask, drained)

    @property
    def _workers(self) -> list[WorkerProgram]:
        """The workers that run now."""
        return [place.program for place in self._fleet.workers if place.program is not None]

    # ------------------------------------------------------------ the audit

    def _audit(self) -> None:
        result = self.result
        for failure in self.loop.failures:
            self._violate("unhandled", failure)
        streams = [stream for work in self._fleet.work for stream in work.streams]
        seen = [stream.seen for stream in streams if not stream.is_cut_off]
        result.num_carried_on = num_carried_on(streams)
        result.violations += self._watcher.violations.values()
        with redis.Redis(unix_socket_path=str(self._server_process.path)) as connection:
            snapshot = take_snapshot(connection, Keys(QUEUE))
        for name in _OF_JOBS:
            snapshot.keys.pop(name, None)
        sent, over_http = self._fleet.requests, self._fleet.streams
        find_ids(over_http, snapshot)
        of_http = {stream.request.request_id for stream in over_http}
        claimed = [claim.claimed for claim in self._notes.claims]
        result.violations += [
            violation
            for violation in audit(sent, seen, {QUEUE: snapshot}, {}, claimed)
            if violation.rule != "unseen" or violation.request_id not in of_http
        ]
        requests = lives(snapshot)
        result.violations += check_cut_off(sent, streams)
        result.violations += check_scores(sent, snapshot, self.plan)
        result.violations += check_http(over_http, requests, self._notes)
        result.violations += check_leaders(self._server.holds)
        result.violations += check_patience(self._server.scripts, self._notes, self.plan.lease_ms)
        result.violations += check_times(
            self._notes, requests, sent, streams, self.plan.affinity_ms
        )
        result.violations += check_causes(self._notes, requests, self.plan.lease_ms)
        if not self.plan.faults:
            result.violations += check_acts(self._server.holds, self._server.acts)
            result.violations += check_order(sent, snapshot, self.plan)
            num_finished = sum(request.finished_at is not None for request in requests.values())
            result.violations += check_statistics(self._server_process.ask, num_finished)

    def _violate(self, rule: str, seen: str) -> None:
        self.result.violations.append(Violation(rule, "", seen))

    def _where_everybody_waits(self) -> str:
        return "; ".join(_waits(self.loop))


async def _all_end(waiting: Iterable[Awaitable[object]], seconds: float) -> bool:
    """Returns whether everything ends within some seconds."""
    tasks = [asyncio.ensure_future(each) for each in waiting]
    _, late = await asyncio.wait(tasks, timeout=seconds) if tasks else (None, None)
    return not late


def _waits(loop: SimulatedLoop) -> Iterator[str]:
    """Yields where each task of a living process waits."""
    tasks = [task for task in asyncio.all_tasks(loop) if isinstance(task, SimulatedTask)]
    for task in sorted(tasks, key=hash):
        if task.process.is_alive and (stack := task.get_stack(limit=1)):
            at = f"{Path(stack[-1].f_code.co_filename).name}:{stack[-1].f_lineno}"
            yield f"{task.process.name} {task.get_coro().__qualname__} at {at}"


def run_world(
    plan: Plan,
    library: Path,
    *,
    story: TextIO | None = None,
    recorder: Recorder | None = None,
    server_kind: str = "",
) -> Result:
    """Run a world with a new server of the kind `server_kind`. Returns the result. `story` gets a
    log of all events, and `recorder` gets all commands."""
    with (
        tempfile.TemporaryDirectory(prefix="world-") as folder,
        # Each write to the disk costs a system call.
        ServerProcess(Path(folder), library, server_kind, keeps_data=plan.kills_server) as server,
    ):
        world = World(plan, server, story, recorder)
        try:
            return world.run()
        finally:
            world.close()
