"""The whole path: a client, Redis, and a worker, each in a separate process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import redis.asyncio

from benchmarks.lib.memory import peak_bytes, reset_peak, tree
from benchmarks.lib.streaming import Stream, drive
from benchmarks.table.jobs import Job, Outcome, Request, main
from benchmarks.table.rows.engine import COUNTERS
from promptq import AsyncClient
from promptq.shared.protocol.keys import Keys
from promptq.shared.server.embedded import EmbeddedServer

_HEARTBEAT_SECONDS = 1.0


def run(job: Job, done: Callable[[str, Outcome], None]) -> None:
    """Run all workloads through Redis and one worker."""
    flags = (
        *("--model", job.model, "--dtype", "bfloat16"),
        *("--max-num-seqs", str(job.max_num_seqs)),
        *("--max-model-len", str(job.max_model_len)),
        *("--kv-cache-memory", str(job.kv_cache_bytes)),
    )
    with EmbeddedServer() as server:
        worker = start_worker(server.url, *flags)
        try:
            asyncio.run(_drive_all(job, done, server.url, worker.pid))
        finally:
            worker.terminate()
            worker.wait()


def start_worker(url: str, *flags: str) -> subprocess.Popen[bytes]:
    """Start a worker, and wait until it is ready. Raises RuntimeError if the worker ends
    earlier."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "promptq.worker", "--redis", url, *flags], stdout=subprocess.PIPE
    )
    assert worker.stdout is not None
    if not worker.stdout.readline().startswith(b"ready"):
        raise RuntimeError("the worker ended while it started; see the log of the row")
    return worker


async def _drive_all(
    job: Job, done: Callable[[str, Outcome], None], url: str, worker_pid: int
) -> None:
    async with AsyncClient(url) as client, redis.asyncio.Redis.from_url(url) as plain:
        stream = streams_of(client)
        for workload in job.workloads:
            pids = tree(worker_pid)
            reset_peak(pids)
            before = await _counters(plain)
            outcome = await drive(workload, stream)
            after = await _counters(plain)
            outcome.counters = {name: after[name] - before[name] for name in COUNTERS}
            outcome.peak_bytes = peak_bytes(tree(worker_pid))
            done(workload.name, outcome)


def streams_of(client: AsyncClient, **fields: Any) -> Stream:
    """Returns a function that sends a request to the client's queue, with further `fields`, and
    yields the number of tokens in each event."""

    async def stream(request: Request) -> AsyncIterator[int]:
        fixed: dict[str, Any] = {
            "max_tokens": request.num_output,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        request_id = await client.enqueue(request.prompt, **fixed, **fields)
        async with aclosing(client.stream(request_id)) as events:
            async for event in events:
                if event.error is not None:
                    raise RuntimeError(f"{event.error.type}: {event.error.message}")
                if event.token_ids:
                    yield len(event.token_ids)

    return stream


async def _counters(client: redis.asyncio.Redis) -> dict[str, float]:
    """Waits until the worker's heartbeat is up to date, and returns its counters."""
    await asyncio.sleep(1.5 * _HEARTBEAT_SECONDS)
    keys = Keys("default")
    worker_id = (await client.zrange(keys.workers, 0, 0))[0].decode()
    told = await client.hgetall(keys.worker(worker_id))
    return {name: float(told[name.encode()]) for name in COUNTERS}


if __name__ == "__main__":
    main(run)
