"""Measures what a fleet of equal workers costs its server: while the workers are idle, and for a
request.

The workers' time is virtual. The server's CPU time is real, and includes reading and writing its
sockets.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import redis

from promptq.shared.protocol.keys import Keys
from promptq.shared.settings.worker import WorkerSettings
from tests.programs.chaos.audit.outcome import take_snapshot
from tests.programs.simulation.auditor import lives
from tests.programs.simulation.plan import Plan
from tests.programs.simulation.processes import QUEUE
from tests.programs.simulation.server import ServerProcess
from tests.programs.simulation.watch import LOOK_SECONDS
from tests.programs.simulation.world import World

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

T = TypeVar("T")

NUM_REQUESTS = 200
_SECONDS = 10.0
"""Virtual seconds without requests, and then seconds in which a client sends all requests."""
_SETTLE_SECONDS = 5.0
"""Virtual seconds after which new workers have done what they do only once."""

HEAD = """\
| workers | idle: commands/s of a worker | idle: server's ms of CPU/s | one request: commands \
| one request: server's ms of CPU | first token, p50 and p95 (ms) |
|---|---|---|---|---|---|"""


@dataclass
class Cost:
    """The server's cost within some virtual seconds: commands, and milliseconds of CPU time."""

    num_commands: float
    ms: float
    seconds: float

    def minus(self, idle: Cost) -> Cost:
        """Returns this cost without the cost of idle workers in the same time. `idle` is a measured
        idle cost."""
        share = self.seconds / idle.seconds
        ms, num_commands = self.ms - share * idle.ms, self.num_commands - share * idle.num_commands
        return Cost(num_commands, ms, self.seconds)


@dataclass
class FleetCosts:
    """The figures of a fleet. `busy` is the cost of all requests, without the cost of idle
    workers."""

    num_workers: int
    num_requests: int
    idle: Cost
    busy: Cost
    first_tokens_ms: list[float]

    @property
    def idle_commands_per_second(self) -> float:
        """Number of commands that an idle worker sends in a second."""
        return self.idle.num_commands / self.num_workers / self.idle.seconds

    def __str__(self) -> str:
        """A row of the table that begins with `HEAD`."""
        of_request = self.busy.num_commands / self.num_requests, self.busy.ms / self.num_requests
        twentieths = statistics.quantiles(self.first_tokens_ms, n=20)
        cells = [
            f"{self.num_workers:,}",
            f"{self.idle_commands_per_second:.2f}",
            f"{self.idle.ms / self.idle.seconds:.2f}",
            f"{of_request[0]:.1f}",
            f"{of_request[1]:.2f}",
            f"{twentieths[9]:.0f}, {twentieths[18]:.0f}",
        ]
        return f"| {' | '.join(cells)} |"


class Equal(random.Random):
    """Takes the first of all choices, so that all workers are alike, and as fast as measured."""

    def choice(self, seq: SupportsLenAndGetItem[T]) -> T:
        return seq[0]


class FleetWorld(World):
    """A world without faults. All its workers start before the first request."""

    most_callbacks = sys.maxsize

    def __init__(self, plan: Plan, server: ServerProcess) -> None:
        super().__init__(plan, server, None, None)
        for place in self._fleet.workers:
            place.make_random = Equal
        self.costs: list[Cost] = []

    async def _main(self) -> None:
        await self._start_workers()
        await self._measure(asyncio.sleep(_SECONDS))
        for place in self._fleet.queue_clients:
            place.start()
        await self._measure(self._serve())
        await self._drain_all()

    async def _start_workers(self) -> None:
        self._server.listen()
        for place in self._fleet.workers:
            place.start()
        while not all(worker.ready_at for worker in self._workers):
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(_SETTLE_SECONDS)

    async def _serve(self) -> None:
        await asyncio.sleep(_SECONDS)
        await self._wait_for_clients()

    async def _measure(self, course: Awaitable[None]) -> None:
        server, began_at = self._server_process, self.loop.now
        commands, cpu_ms = self._server.num_commands.total(), server.cpu_ms
        await course
        num_commands = self._server.num_commands.total() - commands
        self.costs.append(Cost(num_commands, server.cpu_ms - cpu_ms, self.loop.now - began_at))

    def first_tokens_ms(self) -> list[float]:
        """Returns the milliseconds from each request to its first token. Delayed requests do not
        count."""
        with redis.Redis(unix_socket_path=str(self._server_process.path)) as connection:
            requests = lives(take_snapshot(connection, Keys(QUEUE)))
        return [
            1000 * (request.first_token_at - request.enqueued_at)
            for sent in self._fleet.requests
            if not sent.delay_ms
            and (request := requests.get(sent.request_id)) is not None
            and request.first_token_at is not None
        ]


def measure(
    num_workers: int, num_requests: int, seed: int, library: Path, kind: str = ""
) -> FleetCosts:
    """Run a fleet: first without requests, then with the requests of one client. Returns the
    figures.

    Raises RuntimeError if the world's audit finds a violation.
    """
    lease_ms = WorkerSettings().lease_ms
    plan = Plan(seed, num_workers, 1, num_requests, _SECONDS, (), lease_ms)
    with (
        tempfile.TemporaryDirectory(prefix="fleet-") as folder,
        ServerProcess(Path(folder), library, kind) as server,
    ):
        world = FleetWorld(plan, server)
        try:
            if violations := world.run().violations:
                raise RuntimeError(f"{num_workers} workers: {violations[0]}")
            idle, busy = world.costs
            return FleetCosts(
                num_workers, num_requests, idle, busy.minus(idle), world.first_tokens_ms()
            )
        finally:
            world.close()
