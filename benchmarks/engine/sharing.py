"""Measures how much a worker slows down other clients of its inference server.

Three phases take turns. In the first, clients call the server directly (the foreground). In the
second, the foreground and a full queue behind a worker use the server together. In the third, only
the queue uses the server; this phase begins when the worker uses all slots, five minutes after the
foreground's last call. Each foreground request has a new prompt. The figures are the foreground's
time to the first token, and the queue's tokens per second. Each ratio divides a figure of the
second phase by the figure of the first or third phase.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.cancel import percentile
from benchmarks.lib.models import CACHE, MODELS, model_dir
from promptq import AsyncClient
from promptq.shared.protocol.request import SamplingParams
from promptq.shared.server.embedded import EmbeddedServer
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.upstream.connecting import DIALECTS
from promptq.worker.upstream.dialects.transport import Server
from tests.programs.engines.real_servers import NAMES, RealServer, real_server, why_missing
from tests.support.processes import started
from tests.support.roles import as_role, bring_in_roles
from tests.support.waiting import async_until

_ENDLESS = {"0": -100.0, "2": -100.0}
_OUTPUT_TOKENS = 16
_POLL_SECONDS = 0.2
_LEAST_VOCABULARY = 2000
"""Both models have more tokens."""


@dataclass
class Phase:
    """The results of one phase: the seconds to the first token of each foreground request, and the
    queue's tokens per second."""

    first_tokens: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0


@dataclass
class Bench:
    server: RealServer
    redis_url: str
    options: argparse.Namespace
    random: random.Random

    async def foreground(self) -> list[float]:
        """Call the server once every `--every` seconds. Returns the seconds to each first token."""
        loop = asyncio.get_running_loop()
        begin, calls = loop.time(), []
        for number in range(self.options.requests):
            await asyncio.sleep(begin + number * self.options.every - loop.time())
            calls.append(asyncio.create_task(self._call()))
        return await asyncio.gather(*calls)

    async def _call(self) -> float:
        prompt = self._prompt(self.options.prompt_tokens)
        params = SamplingParams(temperature=0.0, logit_bias=_ENDLESS)
        request = EngineRequest(0, prompt, params, 0, _OUTPUT_TOKENS)
        http, first = Server(self.server.url), 0.0
        began = time.perf_counter()
        dialect = DIALECTS[self.server.name](is_exact=True)
        async with aclosing(dialect.generate(http, request, [], "m")) as chunks:
            async for chunk in chunks:
                if chunk.token_ids and not first:
                    first = time.perf_counter() - began
        await http.close()
        return first

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self.random.randrange(10, _LEAST_VOCABULARY) for _ in range(num_tokens)]

    @asynccontextmanager
    async def queue(self) -> AsyncIterator[None]:
        """Inside this context, keep the queue full. At the end, cancel the queue's requests."""
        ids: list[str] = []

        async def fill(client: AsyncClient) -> None:
            while True:
                if (await client.stats()).waiting < self.server.slots:
                    for _ in range(self.server.slots):
                        fields: dict[str, Any] = {"temperature": 0.0, "logit_bias": _ENDLESS}
                        fields["max_tokens"] = self.random.randrange(60, 180)
                        ids.append(await client.enqueue(self._prompt(32), **fields))
                await asyncio.sleep(_POLL_SECONDS)

        async with AsyncClient(as_role("operator", self.redis_url)) as client:
            task = asyncio.create_task(fill(client))
            await async_until(lambda: self.server.num_running() >= self.server.slots // 2)
            yield
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for request_id in ids:
                await client.cancel(request_id)
        await async_until(lambda: not self.server.num_running())

    async def num_generated(self) -> int:
        async with AsyncClient(as_role("operator", self.redis_url)) as client:
            [worker] = (await client.stats()).workers
        return worker.generation_tokens

    async def phase(self, kind: str) -> Phase:
        if kind == "foreground":
            return Phase(await self.foreground())
        async with self.queue():
            slots = self.server.slots if kind == "queue" else 0
            while self.server.num_running() < slots:  # noqa: ASYNC110 (no event reports it)
                await asyncio.sleep(_POLL_SECONDS)
            before, began = await self.num_generated(), time.perf_counter()
            found = Phase()
            if kind == "both":
                found.first_tokens = await self.foreground()
            else:
                await asyncio.sleep(self.options.requests * self.options.every)
            count = await self.num_generated() - before
            found.tokens_per_second = count / (time.perf_counter() - began)
        return found

    async def run(self) -> None:
        kinds = ["foreground", "both", "queue"]
        phases: dict[str, list[Phase]] = {kind: [] for kind in kinds}
        for number in range(self.options.turns):
            for kind in kinds if number % 2 == 0 else [kinds[-1], *kinds[:-1]]:
                phases[kind].append(found := await self.phase(kind))
                print(f"turn {number + 1}, {kind}: {_line(found)}", flush=True)
        for name, share in (("p50", 0.5), ("p95", 0.95)):
            alone, beside = (
                percentile(
                    [seconds for each in phases[kind] for seconds in each.first_tokens], share
                )
                for kind in ("foreground", "both")
            )
            print(f"first token {name}: {beside / alone:.2f} ({beside:.3f} s and {alone:.3f} s)")
        ratios = [
            both.tokens_per_second / alone.tokens_per_second
            for both, alone in zip(phases["both"], phases["queue"], strict=True)
        ]
        print(f"queue's tokens/s: {statistics.median(ratios):.2f} ({sorted(ratios)})")


def _line(found: Phase) -> str:
    times = found.first_tokens
    told = f"{found.tokens_per_second:.1f} tokens/s"
    if times:
        told += f", first token p50 {statistics.median(times):.3f} s, p95"
        told += f" {percentile(times, 0.95):.3f} s, most {max(times):.3f} s"
    return told


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sharing", description=__doc__)
    parser.add_argument("--engine", choices=NAMES, default="llama.cpp")
    parser.add_argument("--model", choices=["54m", "shipped"], default="54m")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20, help="foreground requests in a phase")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between them")
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if why := why_missing(options.engine):
        raise SystemExit(f"{options.engine}: {why}")
    model = MODEL_DIR if options.model == "shipped" else model_dir(MODELS["54m"], CACHE)
    flags = ("--engine", options.engine, "--dtype", "float32", "--model", str(model))
    with (
        tempfile.TemporaryDirectory() as folder,
        real_server(options.engine, Path(folder), model=model, slots=options.slots) as server,
        EmbeddedServer() as embedded,
    ):
        bring_in_roles(embedded.url)
        more = ("--upstream", server.url, "--max-num-seqs", str(options.slots))
        with started(Path(folder), embedded.url, *flags, *more):
            bench = Bench(server, embedded.url, options, random.Random(options.seed))
            asyncio.run(bench.run())


if __name__ == "__main__":
    main()
