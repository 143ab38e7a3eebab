"""Measures how long a cancelled request keeps its KV blocks.

While a full batch of the shipped model decodes, a plain client sets the flag and publishes the
message. The delay is the time from the message until the engine has freed the blocks. The benchmark
measures the delay, and the number of steps that the engine completes during the delay. It also
measures how much longer the delay is than one step. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

import redis.asyncio
from rich.table import Table

from promptq.producer.commands.screens.terminal import console_for_list
from promptq.shared.protocol.request import NewRequest, Request
from promptq.shared.queue.request_queue import AsyncRequestQueue, new_request_id
from promptq.shared.server.embedded import EmbeddedServer
from promptq.shared.settings.worker import WorkerSettings, read_worker_settings
from promptq.worker.leases.lease import LeaseState
from promptq.worker.leases.rows import PreparedRequest
from promptq.worker.serve.build import Served, build
from promptq.worker.serve.worker import Worker


@dataclass(frozen=True, slots=True)
class Freed:
    """The measured delay of one cancel. Times are in seconds."""

    delay: float
    step: float
    """The longest step during the delay."""
    num_steps: int


class NotingEngine:
    """Wraps an engine, and records when each abort took effect."""

    def __init__(self, engine: Any) -> None:
        self.freed_at: dict[int, float] = {}
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def abort(self, sequence_id: int) -> bool:
        was_here: bool = self._engine.abort(sequence_id)
        self.freed_at.setdefault(sequence_id, time.perf_counter())
        return was_here


def percentile(values: list[float], share: float) -> float:
    """Returns the value that a part `share` (0 to 1) of all values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def measure(
    url: str, settings: WorkerSettings, served: Served, num_cancels: int
) -> list[Freed]:
    """Keep the batch full, and cancel one request after another. Returns the delay of each
    cancel."""
    request = Request.build({"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True})
    async with redis.asyncio.Redis.from_url(url) as client:
        engine = NotingEngine(served.engine)
        freed_at = engine.freed_at
        worker = Worker(settings, replace(served, engine=engine), client)
        queue = AsyncRequestQueue(client)
        await worker.start()
        try:
            measured = []
            for _ in range(num_cancels):
                while len(running := _decoding(worker)) < settings.max_num_seqs:
                    if missing := settings.max_num_seqs - len(worker.leases) - await queue.count():
                        new = [NewRequest(new_request_id(), request) for _ in range(missing)]
                        await queue.enqueue(new)
                    await asyncio.sleep(0.01)
                measured.append(await _cancel(client, queue, worker, running[0], freed_at))
            return measured
        finally:
            await queue.clear()
            await worker.stop()


def _decoding(worker: Worker) -> list[PreparedRequest]:
    running = [it.prepared for it in worker.leases if it.state is LeaseState.RUNNING]
    return [held for held in running if held.num_emitted]


async def _cancel(
    client: redis.asyncio.Redis,
    queue: AsyncRequestQueue,
    worker: Worker,
    victim: PreparedRequest,
    freed_at: dict[int, float],
) -> Freed:
    steps_before, step = worker.engine.stats.num_steps, worker.engine.stats.step_seconds
    started = time.perf_counter()
    await client.hset(queue.keys.request(victim.request_id), "cancelled", "1")
    await client.publish(queue.keys.control, f"cancel:{victim.request_id}")
    while victim.sequence_id not in freed_at:
        step = max(step, worker.engine.stats.step_seconds)
        await asyncio.sleep(0.0005)
    step = max(step, worker.engine.stats.step_seconds)
    num_steps = worker.engine.stats.num_steps - steps_before
    return Freed(freed_at[victim.sequence_id] - started, step, num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks cancel", description=__doc__)
    parser.add_argument("--cancels", type=int, default=300)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    options = parser.parse_args()
    settings = read_worker_settings(max_num_seqs=options.max_num_seqs)
    served = build(settings)
    with EmbeddedServer() as server:
        measured = asyncio.run(measure(server.url, settings, served, options.cancels))
    table = Table(f"{len(measured)} cancels", "p50", "p95", "p99", "largest")
    rows = {
        "cancel to blocks free, ms": [item.delay * 1000 for item in measured],
        "a step, ms": [item.step * 1000 for item in measured],
        "beyond one step, ms": [max(0.0, item.delay - item.step) * 1000 for item in measured],
        "steps completed meanwhile": [float(item.num_steps) for item in measured],
    }
    for name, values in rows.items():
        table.add_row(name, *(f"{percentile(values, at):.1f}" for at in (0.5, 0.95, 0.99, 1.0)))
    console_for_list().print(table)


if __name__ == "__main__":
    main()
