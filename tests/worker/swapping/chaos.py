"""Kills processes while two models change places.

Both queues of one worker have streams all the time, so that its models change every few seconds.
The process of a model and the worker itself are killed, and the worker is drained and started
again. The model-free engine's text depends on the seed alone, so each stream is compared with what
it has to be, token by token, as it came and as it is in its log.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis

from promptq import AsyncClient
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.server.embedded import EmbeddedServer
from tests.support.model_free import text_of
from tests.support.processes import StartedWorker, family_of
from tests.support.requests import check_log
from tests.support.roles import bring_in_roles

QUEUES = ("a", "b")
OPTIONS = [
    *("--model", "model-free", "--model", "model-free", "--queue", "a", "--queue", "b"),
    *("--swap-least-seconds", "1", "--swap-longest-wait", "3", "--drain-seconds", "0.3"),
    *("--lease-ms", "2000", "--max-num-seqs", "8", "--max-crashes", "1000"),
]
_STREAMS = 6
_MOST_TOKENS = 6000
_MEAN_SECONDS = 5.0
"""Between two faults."""


@dataclass
class Outcome:
    """What came of a run."""

    completed: int = 0
    resumed: int = 0
    changes: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


class Run:
    """One run of `seconds`, whose faults depend on the seed."""

    def __init__(self, folder: Path, url: str, seed: int, seconds: float) -> None:
        self.outcome = Outcome()
        self._folder = folder
        self._url = url
        self._rng = random.Random(seed)
        self._ends_at = time.monotonic() + seconds
        self._next_seed = 0
        self._worker = self._start()

    async def run(self) -> Outcome:
        async with AsyncClient(self._url, "a") as a, AsyncClient(self._url, "b") as b:
            streams = [self._stream(client) for client in (a, b) for _ in range(_STREAMS)]
            await asyncio.gather(self._hurt(), *streams)
        self._worker.terminate()
        if code := await asyncio.to_thread(self._worker.wait):
            self.outcome.violations.append(f"the worker ended with {code}")
        self._count()
        return self.outcome

    async def _stream(self, client: AsyncClient) -> None:
        while time.monotonic() < self._ends_at:
            self._next_seed += 1
            seed, length = self._next_seed, self._rng.randint(1, _MOST_TOKENS)
            request_id = await client.enqueue("Once", seed=seed, max_tokens=length)
            text, count, attempts = "", 0, set()
            async for event in client.stream(request_id):
                if event.index != count:
                    self._violate(request_id, f"token {event.index} came after {count}")
                count += len(event.token_ids)
                text += event.text
                attempts.add(event.attempt)
            if text != text_of(seed, length):
                self._violate(request_id, f"{count} tokens, not the {length} that it should have")
            await asyncio.to_thread(
                self._check_log, client.queue.keys.queue, request_id, seed, length
            )
            self.outcome.completed += 1
            self.outcome.resumed += len(attempts) > 1

    def _check_log(self, queue: str, request_id: str, seed: int, length: int) -> None:
        with redis.Redis.from_url(self._url) as connection:
            try:
                check_log(RequestQueue(connection, queue), request_id, text_of(seed, length))
            except AssertionError as error:
                self._violate(request_id, f"in its log: {error}")

    async def _hurt(self) -> None:
        while (now := time.monotonic()) < self._ends_at:
            wait = self._rng.expovariate(1 / _MEAN_SECONDS)
            await asyncio.sleep(min(wait, self._ends_at - now))
            fault = self._rng.choice(["a model's process killed", "killed", "drained"])
            await asyncio.to_thread(self._inflict, fault)
            self.outcome.faults[fault] = self.outcome.faults.get(fault, 0) + 1

    def _inflict(self, fault: str) -> None:
        if fault == "a model's process killed":
            # The owner, what forks, and the processes of the models, in this order.
            victims = family_of(self._worker.process.pid)[-len(QUEUES) :]
            with suppress(ProcessLookupError):
                os.kill(self._rng.choice(victims), signal.SIGKILL)
            return
        if fault == "killed":
            self._worker.process.kill()
        else:
            self._worker.terminate()
        code = self._worker.wait()
        if fault == "drained" and code != 0:
            self.outcome.violations.append(f"a drained worker ended with {code}")
        self._count()
        self._worker = self._start()

    def _start(self) -> StartedWorker:
        return StartedWorker(self._folder, self._url, *OPTIONS)

    def _count(self) -> None:
        self.outcome.changes += len(self._worker.logged("another model"))

    def _violate(self, request_id: str, what: str) -> None:
        self.outcome.violations.append(f"{request_id}: {what}")


def main() -> int:
    """Exit code 1 at any violation."""
    parser = argparse.ArgumentParser(prog="python -m tests swapping", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"chaos of swapping: seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer() as server:
        bring_in_roles(server.url)
        run = Run(Path(folder), server.url, seed, options.seconds)
        outcome = asyncio.run(run.run())
    for violation in outcome.violations:
        print(violation)
    faults = ", ".join(f"{what} {times}" for what, times in sorted(outcome.faults.items()))
    print(
        f"{outcome.completed} streams completed, {outcome.resumed} of them carried on;"
        f" {outcome.changes} changes of model; {faults}; {len(outcome.violations)} violations"
    )
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
