"""Compares fleets whose workers prefer requests with prefixes that they hold, with other fleets.

`python -m tests simulate --fleets 2 4 16 --affinity MS` prints both figures, for four loads:

- questions about documents; all questions wait at the beginning
- conversations whose turns come one after another
- agents that call tools between their turns
- requests that share nothing
"""

from __future__ import annotations

import asyncio
import random
import statistics
import string
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from promptq.producer.clients.async_client import AsyncClient
from promptq.shared.settings.worker import WorkerSettings
from tests.programs.simulation.fleet_costs import Equal, FleetWorld
from tests.programs.simulation.loop import Process
from tests.programs.simulation.plan import Plan
from tests.programs.simulation.processes import QUEUE, URL
from tests.programs.simulation.server import ServerProcess

SIZES = ((8, 6000),)
"""Slots and KV blocks of a worker: a part of all prompts fits into its cache."""
_DOCUMENT, _QUESTION, _OPENING, _TURN, _PLAIN = 2400, 40, 400, 200, 1200
"""Characters, which are tokens, of the parts of prompts."""
_MOST_THINK_SECONDS = 2.0
_OUTPUT = 16
_AGENT_SIZES, _AGENT_SLOWNESS = ((8, 1500),), 40
"""Blocks and speed of an agent's model. One token here stands for several, so that this costs less
time, while the tools' times are real."""
_AGENTS_PER_SECOND = 0.9 * 0.178
"""Agents that begin, for each worker: a load of 0.9. A worker ends 0.178 in a second if all begin
at once, with `affinity_ms` 500 and unlimited caches."""

HEAD = """\
| load | workers | affinity_ms | prompt tokens computed / needed once | tokens/s \
| waiting, p50 and p99 (ms) | a session's mean time (s) |
|---|---|---|---|---|---|---|"""


@dataclass
class Served:
    """Figures of a fleet, as its client measures them."""

    num_needed: int = 0
    """Prompt tokens that one worker with an unlimited cache would compute."""
    num_computed: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    waits_ms: list[float] = field(default_factory=list)
    session_seconds: list[float] = field(default_factory=list)
    """For each session, the time from its first request to the end of its last one."""

    def row(self, load: str, num_workers: int, affinity_ms: int) -> str:
        """Returns a row of the table that begins with `HEAD`."""
        hundredths = statistics.quantiles(self.waits_ms, n=100, method="inclusive")
        cells = [
            *(load, str(num_workers), str(affinity_ms)),
            f"{self.num_computed / self.num_needed:.2f}",
            f"{self.num_tokens / self.seconds:,.0f}",
            f"{hundredths[49]:,.0f}, {hundredths[98]:,.0f}",
            f"{statistics.mean(self.session_seconds):.1f}" if self.session_seconds else "-",
        ]
        return f"| {' | '.join(cells)} |"


class _Client:
    """Sends the requests of a load, and notes their figures."""

    def __init__(self, client: AsyncClient, rng: random.Random, num_workers: int) -> None:
        self._client = client
        self.rng = rng
        self.num_workers = num_workers
        self.served = Served()

    def text(self, length: int) -> str:
        """Returns a new text, which some worker has to compute."""
        self.served.num_needed += length
        return "".join(self.rng.choices(string.ascii_letters, k=length))

    async def ask(self, prompt: str, session: str | None = None, num_tokens: int = _OUTPUT) -> str:
        """Returns the answer to a prompt."""
        answer = ""
        fields: dict[str, Any] = {"session": session, "ignore_eos": True}
        request_id = await self._client.enqueue(prompt, max_tokens=num_tokens, **fields)
        async for event in self._client.stream(request_id):
            answer += event.text
            if event.stats is not None:
                self.served.waits_ms.append(event.stats.queue_ms)
        self.served.num_tokens += len(prompt) + len(answer)
        return answer

    async def converse(self, name: str, num_turns: int) -> None:
        rng = random.Random(name)
        await asyncio.sleep(_MOST_THINK_SECONDS * rng.random())
        prompt = self.text(_OPENING)
        for turn in range(num_turns):
            if turn:
                await asyncio.sleep(_MOST_THINK_SECONDS * rng.random() ** 2)
                prompt += self.text(_TURN)
            prompt += await self.ask(prompt, name)

    async def let_work(self, name: str) -> None:
        """Lets an agent work: each turn ends with a call of a tool, whose result begins the next
        turn. Of the calls, 86% end within a second."""
        rng = random.Random(name)
        began_at, prompt = time.monotonic(), ""
        for turn in range(rng.randint(4, 16)):
            if turn:
                shortest, longest = (0.2, 1.0) if rng.random() < 0.86 else (1.0, 10.0)
                await asyncio.sleep(shortest * (longest / shortest) ** rng.random())
            prompt += self.text(rng.randint(25, 175) if turn else 300)
            prompt += await self.ask(prompt, name, num_tokens=rng.randint(4, 32))
        self.served.session_seconds.append(time.monotonic() - began_at)


async def _documents(client: _Client, scale: float) -> None:
    documents = [client.text(_DOCUMENT) for _ in range(20)]
    prompts = [
        document + client.text(_QUESTION)
        for document in documents
        for _ in range(round(50 * scale))
    ]
    client.rng.shuffle(prompts)
    await asyncio.gather(*map(client.ask, prompts))


async def _conversations(client: _Client, scale: float) -> None:
    names = [f"{client.rng.random()}" for _ in range(round(100 * scale))]
    await asyncio.gather(*(client.converse(name, 8) for name in names))


async def _agents(client: _Client, scale: float) -> None:
    agents = []
    for _ in range(round(100 * scale * client.num_workers)):
        agents.append(asyncio.create_task(client.let_work(f"{client.rng.random()}")))
        await asyncio.sleep(client.rng.expovariate(_AGENTS_PER_SECOND * client.num_workers))
    await asyncio.gather(*agents)


async def _nothing_shared(client: _Client, scale: float) -> None:
    prompts = [client.text(_PLAIN) for _ in range(round(600 * scale))]
    await asyncio.gather(*map(client.ask, prompts))


LOADS: dict[str, Callable[[_Client, float], Awaitable[None]]] = {
    "20 documents": _documents,
    "conversations": _conversations,
    "agents": _agents,
    "nothing shared": _nothing_shared,
}


class _Slow(Equal):
    def choice(self, seq: Any) -> Any:
        is_slowness = 10 in seq
        return _AGENT_SLOWNESS if is_slowness else super().choice(seq)


class _AffinityWorld(FleetWorld):
    """A world in which only one client sends requests."""

    served: Served

    def __init__(self, plan: Plan, server: ServerProcess, load: str, scale: float) -> None:
        super().__init__(plan, server)
        self._load, self._scale = load, scale
        self._fleet.queue_clients.clear()
        for place in self._fleet.workers:
            is_slow = load == "agents"
            place.make_random = _Slow if is_slow else Equal
            place._make = partial(place._make, sizes=_AGENT_SIZES if is_slow else SIZES)

    async def _main(self) -> None:
        await self._start_workers()
        process = Process(self.loop, "client")
        self.served = await process.start(self._serve_load())
        stats = [worker.engine.engine.stats for worker in self._workers if worker.engine]
        self.served.num_computed = sum(each.prompt_tokens for each in stats)
        await self._drain_all()

    async def _serve_load(self) -> Served:
        began_at = time.monotonic()
        async with AsyncClient(URL, QUEUE) as connection:
            client = _Client(connection, random.Random(self.plan.seed), self.plan.num_workers)
            await LOADS[self._load](client, self._scale)
        return replace(client.served, seconds=time.monotonic() - began_at)

    def _audit(self) -> None:
        """Checks nothing: other worlds do."""


def measure(
    load: str,
    num_workers: int,
    affinity_ms: int,
    seed: int,
    scale: float,
    library: Path,
    kind: str = "",
) -> Served:
    """Run a fleet of `num_workers` with a load, and return the figures. `scale` is 1 for the whole
    load."""
    lease_ms = WorkerSettings().lease_ms
    plan = Plan(seed, num_workers, 1, 1, 0.0, (), lease_ms, affinity_ms=affinity_ms)
    with (
        TemporaryDirectory(prefix="fleet-") as folder,
        ServerProcess(Path(folder), library, kind) as server,
    ):
        world = _AffinityWorld(plan, server, load, scale)
        try:
            world.run()
            return world.served
        finally:
            world.close()
