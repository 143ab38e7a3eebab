"""Compares a fleet of a world with real worker processes. Both get the same requests at the same
times.

Each engine takes about the measured time for a step (`step_costs.py`), times `SLOWNESS`. So the
machine is not fully used, and other load on it changes the figures little.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.lib.children import child
from promptq.producer.clients.async_client import AsyncClient
from promptq.shared.server.embedded import EmbeddedServer
from promptq.shared.settings.worker import WorkerSettings
from tests.programs.simulation.fleet_costs import Equal, FleetWorld
from tests.programs.simulation.loop import Process
from tests.programs.simulation.plan import Plan
from tests.programs.simulation.processes import QUEUE, URL
from tests.programs.simulation.real_worker import SLOWNESS
from tests.programs.simulation.server import ServerProcess

NUM_REQUESTS = 120
"""Requests for each worker."""
_BURST = 12
"""Requests for each worker that are sent at once, in each second: most of what a worker serves."""
_MOST_TOKENS = 40

HEAD = """\
| workers | tokens/s | waiting, p50 and p95 (ms) | first token, p50 and p95 (ms) |
|---|---|---|---|"""


@dataclass
class Speed:
    """The speed of a fleet, as its client measures it."""

    name: str
    tokens_per_second: float
    waits_ms: list[float]
    first_tokens_ms: list[float]

    @property
    def figures(self) -> list[float]:
        """The numbers of a row, in the order of `HEAD`."""
        waits, first_tokens = (
            statistics.quantiles(times, n=20, method="inclusive")
            for times in (self.waits_ms, self.first_tokens_ms)
        )
        return [self.tokens_per_second, waits[9], waits[18], first_tokens[9], first_tokens[18]]

    def __str__(self) -> str:
        """A row of the table that begins with `HEAD`."""
        rate, *times = (f"{figure:.0f}" for figure in self.figures)
        return f"| {self.name} | {rate} | {', '.join(times[:2])} | {', '.join(times[2:])} |"


def _requests(
    num_workers: int, num_requests: int, rng: random.Random
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yields the second in which each request is sent, and its fields."""
    for number in range(num_workers * num_requests):
        prompt = "".join(rng.choices("abcdefgh", k=rng.randint(1, 60)))
        fields = {"prompt": prompt, "max_tokens": rng.randint(1, _MOST_TOKENS)}
        yield number // (num_workers * _BURST), {**fields, "ignore_eos": True}


async def _serve(name: str, url: str, plan: Plan) -> Speed:
    """Sends all requests, and reads their streams to the end."""
    speed = Speed(name, 0.0, [], [])
    began_at = time.monotonic()

    async def serve(at: float, fields: dict[str, Any]) -> int:
        await asyncio.sleep(began_at + at - time.monotonic())
        sent_at = time.monotonic()
        request_id = await client.enqueue(**fields)
        num_tokens = 0
        async for event in client.stream(request_id):
            if not num_tokens:
                speed.first_tokens_ms.append(1000 * (time.monotonic() - sent_at))
            num_tokens += len(event.token_ids)
            if event.stats is not None:
                speed.waits_ms.append(event.stats.queue_ms)
        assert num_tokens == fields["max_tokens"]
        return num_tokens

    async with AsyncClient(url, QUEUE) as client:
        rng = random.Random(plan.seed)
        requests = _requests(plan.num_workers, plan.num_requests, rng)
        all_tokens = await asyncio.gather(*(serve(*request) for request in requests))
    speed.tokens_per_second = sum(all_tokens) / (time.monotonic() - began_at)
    return speed


class _Slow(Equal):
    def choice(self, seq: Any) -> Any:
        return SLOWNESS if SLOWNESS in seq else super().choice(seq)


class _TimedWorld(FleetWorld):
    """A world in which only `_serve` sends requests."""

    speed: Speed

    def __init__(self, plan: Plan, server: ServerProcess) -> None:
        super().__init__(plan, server)
        self._fleet.queue_clients.clear()
        for place in self._fleet.workers:
            place.make_random = _Slow

    async def _main(self) -> None:
        await self._start_workers()
        client = Process(self.loop, "client")
        self.speed = await client.start(_serve("world", URL, self.plan))
        await self._drain_all()

    def _audit(self) -> None:
        """Checks nothing: `_serve` does."""


def plan_of(num_workers: int, num_requests: int, seed: int) -> Plan:
    return Plan(seed, num_workers, 1, num_requests, 0.0, (), WorkerSettings().lease_ms)


def in_a_world(plan: Plan, library: Path, kind: str = "") -> Speed:
    """Run the plan in a simulated world. Returns the speed."""
    with (
        TemporaryDirectory(prefix="fleet-") as folder,
        ServerProcess(Path(folder), library, kind) as server,
    ):
        world = _TimedWorld(plan, server)
        try:
            world.run()
            return world.speed
        finally:
            world.close()


def in_processes(plan: Plan) -> Speed:
    """Run the plan with real worker processes and a real server. Returns the speed."""
    worker = "tests.programs.simulation.real_worker"
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedServer()).url
        command = (worker, "--redis", url, "--queue", QUEUE, "--model", "model-free")
        for _ in range(plan.num_workers):
            stack.enter_context(child(*command))
        return asyncio.run(_serve("processes", url, plan))
