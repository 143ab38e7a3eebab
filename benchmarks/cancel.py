"""How long a cancelled request keeps its KV blocks: `python -m benchmarks.cancel`.

A plain client sets the flag and publishes the message while a full batch of the shipped model is
decoding. Measured is the time from just before that to the moment at which the engine has freed the
blocks, and how much of it lies beyond the step that was running. Times in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import redis.asyncio
from rich.console import Console
from rich.table import Table

from shared.embedded import EmbeddedServer
from shared.request_queue import AsyncRequestQueue, new_request_id
from shared.schemas import Request
from shared.scripts import NewRequest
from shared.settings import Settings
from worker.building import Served, build
from worker.service import Worker


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def measure(url: str, served: Served, num_cancels: int) -> tuple[list[float], list[float]]:
    """(from cancel to freed, beyond the running step), for each cancel."""
    freed: dict[int, float] = {}
    delays, beyond = [], []
    async with redis.asyncio.Redis.from_url(url) as client:
        worker = Worker(Settings(), served, client)
        worker.engine.on_freed = lambda sequence_id: freed.setdefault(
            sequence_id, time.perf_counter()
        )
        await worker.start()
        queue = AsyncRequestQueue(client)
        batch = served.engine.limits.max_num_seqs
        request = Request.build(
            {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
        )
        for _ in range(num_cancels):
            missing = batch - len(worker.leases)
            new = [NewRequest(new_request_id(), request) for _ in range(missing)]
            if new:
                await queue.enqueue(new)
            while True:
                running = [held for held in worker.leases if held.in_engine and held.num_emitted]
                if len(running) >= batch // 2:
                    break
                await asyncio.sleep(0.005)
            victim = min(running, key=lambda held: held.num_emitted)
            await asyncio.sleep(0.013)
            steps_before = worker.engine.stats.num_steps
            started = time.perf_counter()
            await client.hset(queue.keys.request(victim.request_id), "cancelled", "1")
            await client.publish(queue.keys.control, f"cancel:{victim.request_id}")
            while victim.sequence_id not in freed:
                await asyncio.sleep(0.0005)
            delay = freed[victim.sequence_id] - started
            delays.append(delay * 1000)
            step = worker.engine.stats.step_seconds
            assert worker.engine.stats.num_steps - steps_before <= 3, "freed after the next step"
            beyond.append(max(0.0, delay - step) * 1000)
        await queue.clear()
        for held in worker.leases:
            await queue.cancel(held.request_id)
        while len(worker.leases):
            await asyncio.sleep(0.01)
        await worker.stop()
    return delays, beyond


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cancels", type=int, default=300)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    options = parser.parse_args()
    served = build(Settings(max_num_seqs=options.max_num_seqs))
    with EmbeddedServer() as server:
        delays, beyond = asyncio.run(measure(server.url, served, options.cancels))
    table = Table("milliseconds", "p50", "p95", "p99", "largest")
    for name, values in [("cancel to blocks free", delays), ("beyond one step", beyond)]:
        cells = [f"{percentile(values, share):.2f}" for share in (0.5, 0.95, 0.99, 1.0)]
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
