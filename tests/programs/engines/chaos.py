"""Kills workers and their inference servers: `stand-in`, `vllm` or `llama.cpp`.

Each stream must have the tokens of an undisturbed run, with no gap and no repeat; nothing may
become a dead letter, and at the end nothing may run at a server. `vllm` and `llama.cpp` kill the
real servers instead of the stand-in.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from promptq import AsyncClient
from promptq.shared.server.embedded import EmbeddedServer
from promptq.worker.shipped import MODEL_DIR
from tests.programs.engines.real_servers import NAMES, RealServer
from tests.programs.stand_in_server.batch import continuation
from tests.programs.stand_in_server.starting import StandIn, save_byte_model, stand_in_server
from tests.support.processes import StartedWorker, hear_signals
from tests.support.roles import as_role, bring_in_roles
from tests.support.servers import free_port

NUM_WORKERS = 3
AT_ONCE = 24
_FAULTS = ("break", "abort", "end", "freeze", "overload")
_OPTIONS = ("--dtype", "float32", "--lease-ms", "2000", "--stuck-seconds", "3")


class KillableStandIn:
    """The stand-in as a server that can be killed and started again."""

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._context = ExitStack()
        self._running: StandIn | None = None

    def start(self) -> None:
        self._running = self._context.enter_context(stand_in_server("vllm", port=self._port))

    def kill(self) -> None:
        self._context.close()  # which kills it

    def num_running(self) -> int:
        assert self._running is not None
        return int(self._running.told()["running"])

    def fail(self, fault: str) -> None:
        assert self._running is not None
        self._running.fail(fault)


class World:
    """Servers, workers and requests; `violations` has what must not be."""

    def __init__(self, kind: str, seed: int, folder: Path, url: str) -> None:
        self.kind, self.rng, self.folder, self.url = kind, random.Random(seed), folder, url
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.is_over = False
        self.engine = "vllm" if kind == "stand-in" else kind
        self.servers: list[KillableStandIn | RealServer] = (
            [KillableStandIn(), KillableStandIn()]
            if kind == "stand-in"
            else [RealServer(kind, folder)]
        )
        is_byte = kind == "stand-in"
        self.model = save_byte_model(folder / "model") if is_byte else MODEL_DIR
        self.workers: list[StartedWorker] = []
        self._prompts = [f"prompt {number}" for number in range(50)]

    def expected(self, prompt: str, num_tokens: int) -> list[int]:
        if self.kind == "stand-in":
            return continuation(prompt.encode(), num_tokens)
        from tests.programs.engines.real_servers import undisturbed

        return undisturbed(prompt, num_tokens)

    def start_worker(self, number: int) -> StartedWorker:
        server = self.servers[number % len(self.servers)]
        options = ("--engine", self.engine, "--upstream", server.url, "--model", str(self.model))
        waits = ("--redis-wait", "600", "--max-crashes", "1000")
        return StartedWorker(self.folder, self.url, *options, *_OPTIONS, *waits)

    async def ask(self, client: AsyncClient) -> None:
        """One request after the other, each held against what it must answer."""
        while not self.is_over:
            prompt = self.rng.choice(self._prompts)
            num_tokens = self.rng.randint(1, 300)
            wanted = await asyncio.to_thread(self.expected, prompt, num_tokens)
            is_cancelled = self.rng.random() < 0.1
            request_id = await client.enqueue(
                prompt, max_tokens=num_tokens, temperature=0.0, resume="exact_only"
            )
            found: list[int] = []
            reason = None
            async for event in client.stream(request_id):
                if event.index != len(found) or reason is not None:
                    self.violations.append(f"{request_id}: a gap or a repeat at {event.index}")
                found += event.token_ids
                reason = event.finish_reason
                if is_cancelled and len(found) > num_tokens // 2:
                    await client.cancel(request_id)
                    is_cancelled = False
            if reason not in ("stop", "length", "cancelled"):
                self.violations.append(f"{request_id}: ended with {reason}: {event.error}")
            elif found != wanted[: len(found)] or (reason != "cancelled" and found != wanted):
                self.violations.append(f"{request_id}: other tokens than undisturbed")
            self.counts[f"requests {reason}"] += 1
            self.counts["streams continued"] += event.attempt > 1

    async def kill_workers(self, count: int) -> None:
        """Each worker by itself, since starting one takes seconds."""
        shares = [len(range(number, count, NUM_WORKERS)) for number in range(NUM_WORKERS)]
        await asyncio.gather(*map(self._kill_worker, range(NUM_WORKERS), shares))

    async def _kill_worker(self, number: int, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(self.rng.uniform(0.2, 4.0))
            how = signal.SIGKILL if self.rng.random() < 0.8 else signal.SIGTERM
            worker = self.workers[number]
            worker.process.send_signal(how)
            await asyncio.to_thread(worker.process.wait)
            self.counts[f"workers: {how.name}"] += 1
            self.workers[number] = await asyncio.to_thread(self.start_worker, number)

    async def kill_servers(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(self.rng.uniform(0.5, 3.0))
            server = self.rng.choice(self.servers)
            if isinstance(server, KillableStandIn) and self.rng.random() < 0.5:
                fault = self.rng.choice(_FAULTS)
                server.fail(fault)
                self.counts[f"servers: {fault}"] += 1
                await asyncio.sleep(self.rng.uniform(0.1, 4.0))
                server.fail("")
            server.kill()
            self.counts["servers: SIGKILL"] += 1
            await asyncio.sleep(self.rng.uniform(0.0, 1.0))
            await asyncio.to_thread(server.start)

    async def run(self, worker_kills: int, server_kills: int) -> None:
        for server in self.servers:
            await asyncio.to_thread(server.start)
        self.workers = [await asyncio.to_thread(self.start_worker, it) for it in range(NUM_WORKERS)]
        async with AsyncClient(as_role("operator", self.url)) as client:
            asking = [asyncio.create_task(self.ask(client)) for _ in range(AT_ONCE)]
            faults = (self.kill_workers(worker_kills), self.kill_servers(server_kills))
            await asyncio.gather(*faults)
            self.is_over = True
            await asyncio.gather(*asking)
            if dead := (await client.stats()).dead:
                self.violations.append(f"{dead} dead letters")
        for worker in self.workers:
            worker.process.terminate()
            worker.process.wait()
        for server in self.servers:
            deadline = time.monotonic() + 30
            while (left := server.num_running()) and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            if left:
                self.violations.append(f"{left} still run at {server.url}")
            server.kill()


def main() -> int:
    """Exit code 1 at any violation."""
    hear_signals()
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.engines.chaos", description=__doc__
    )
    parser.add_argument("kind", choices=["stand-in", *NAMES])
    parser.add_argument("--worker-kills", type=int, default=200)
    parser.add_argument("--server-kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"engines: {options.kind}, seed {seed}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="promptq-engines-") as folder, EmbeddedServer() as it:
        bring_in_roles(it.url)
        world = World(options.kind, seed, Path(folder), it.url)
        asyncio.run(world.run(options.worker_kills, options.server_kills))
    for what, count in sorted(world.counts.items()):
        print(f"{count:>8,}  {what}")
    for violation in world.violations[:20]:
        print(violation)
    print(f"{len(world.violations)} violations in {time.monotonic() - started:.0f} s")
    return 1 if world.violations else 0


if __name__ == "__main__":
    sys.exit(main())
