"""The queue without a model: one-token requests from enqueue to claim, publish and finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import redis.asyncio

from benchmarks.table.jobs import Job, Outcome, Trace, Workload, main, now
from benchmarks.table.rows.whole_path import start_worker
from promptq import AsyncClient
from promptq.shared.protocol.keys import Keys
from promptq.shared.server.embedded import EmbeddedServer

_BULK = 500
_POLL_SECONDS = 0.005


def run(job: Job, done: Callable[[str, Outcome], None]) -> None:
    for workload in job.workloads:
        with EmbeddedServer() as server:
            worker = start_worker(
                server.url, "--model", "model-free", "--max-num-seqs", str(job.max_num_seqs)
            )
            try:
                done(workload.name, asyncio.run(drive(server.url, workload)))
            finally:
                worker.terminate()
                worker.wait()


async def drive(url: str, workload: Workload) -> Outcome:
    """Run one workload, and measure from the first enqueue until no request waits or runs."""
    requests = [
        {"prompt": request.prompt, "max_tokens": request.num_output, "ignore_eos": True}
        for request in workload.requests
    ]
    keys = Keys("default")
    async with AsyncClient(url) as client, redis.asyncio.Redis.from_url(url) as plain:
        started = now()
        for first in range(0, len(requests), _BULK):
            await client.enqueue_many(requests[first : first + _BULK])
        while await plain.zcard(keys.pending) or await plain.zcard(keys.leases):  # noqa: ASYNC110 (no event tells it)
            await asyncio.sleep(_POLL_SECONDS)
        return Outcome(now() - started, [Trace(started, num_tokens=1)] * len(requests))


if __name__ == "__main__":
    main(run)
