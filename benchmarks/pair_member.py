"""One of two checkouts that are measured in turns: two workers, and a client that sends requests.

`benchmarks.pairs` runs this file with the interpreter of the checkout: `pair_member.py REDIS_URL
MODEL`. The file uses only features that all releases since 0.2.0 have. Each line of input has a
workload (`solo`, `burst`, `poisson` or `queue`), a seed, and for `poisson` the requests per second.
Each line of output has the figures as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import redis.asyncio

from promptq import AsyncClient

Request = tuple[float, list[int], int]
"""Seconds until a request is sent, its prompt, and the number of tokens to generate."""

_VOCAB_SIZE = 32_000
_BATCH = 64
_POISSON_SECONDS = 12.0
_QUEUE = "queue-alone"
_QUEUE_REQUESTS = 10_000
_BULK = 500
_POLL_SECONDS = 0.005

Figures = dict[str, float]


def main() -> None:
    url, model = sys.argv[1:3]
    flags = ["--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-memory", str(2**29)]
    workers = [
        _start_worker(url, "--model", model, "--max-num-seqs", str(_BATCH), *flags),
        _start_worker(url, "--model", "model-free", "--queue", _QUEUE, "--max-num-seqs", "256"),
    ]
    print("ready", flush=True)
    try:
        asyncio.run(_answer(url))
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


def _start_worker(url: str, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "promptq.worker", "--redis", url, *flags]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    if not worker.stdout.readline().startswith(b"ready"):
        sys.exit("a worker ended while it started")
    return worker


async def _answer(url: str) -> None:
    async with AsyncClient(url) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            workload, seed, *rate = line.split()
            draw = random.Random(f"{workload} {seed}")
            if workload == "queue":
                figures = await _drain_queue(url)
            else:
                figures = await _stream(client, list(_requests(workload, draw, *rate)))
            print(json.dumps(figures), flush=True)


def _requests(workload: str, draw: random.Random, rate: str = "0") -> Iterator[Request]:
    if workload == "solo":
        yield 0.0, _tokens(draw, 128), 48
    elif workload == "burst":
        for _ in range(_BATCH):
            yield 0.0, _tokens(draw, draw.randint(32, 256)), draw.randint(32, 192)
    else:
        at = draw.expovariate(float(rate))
        while at < _POISSON_SECONDS:
            yield at, _tokens(draw, draw.randint(32, 256)), draw.randint(32, 192)
            at += draw.expovariate(float(rate))


async def _stream(client: AsyncClient, requests: list[Request]) -> Figures:
    started = time.perf_counter()
    firsts = sorted(await asyncio.gather(*(_first(client, *request) for request in requests)))
    seconds = time.perf_counter() - started
    return {
        "first_token_p50": firsts[len(firsts) // 2],
        "first_token_p95": firsts[int(len(firsts) * 0.95)],
        "tokens_per_second": sum(num_output for _, _, num_output in requests) / seconds,
        "requests_per_second": len(requests) / seconds,
    }


async def _first(client: AsyncClient, at: float, prompt: list[int], num_output: int) -> float:
    """Sends a request after `at` seconds, and waits for its end. Returns the seconds to its first
    token."""
    await asyncio.sleep(at)
    started, first, num_tokens = time.perf_counter(), 0.0, 0
    fields = {"max_tokens": num_output, "temperature": 0.0, "ignore_eos": True}
    async for event in client.stream(await client.enqueue(prompt, **fields)):
        if event.token_ids and not num_tokens:
            first = time.perf_counter() - started
        num_tokens += len(event.token_ids)
    if num_tokens != num_output:
        raise RuntimeError(f"{num_tokens} tokens came of {num_output}")
    return first


async def _drain_queue(url: str) -> Figures:
    """Measures one-token requests of a worker without a model, from the enqueue call until the last
    request ends."""
    keys = [f"promptq:{{{_QUEUE}}}:{name}" for name in ("pending", "leases")]
    request = {"prompt": [1], "max_tokens": 1, "ignore_eos": True}
    async with AsyncClient(url, queue=_QUEUE) as client, redis.asyncio.Redis.from_url(url) as plain:
        started = time.perf_counter()
        for _ in range(0, _QUEUE_REQUESTS, _BULK):
            await client.enqueue_many([request] * _BULK)
        while any([await plain.zcard(key) for key in keys]):  # noqa: ASYNC110 (no event reports it)
            await asyncio.sleep(_POLL_SECONDS)
    return {"requests_per_second": _QUEUE_REQUESTS / (time.perf_counter() - started)}


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(1, _VOCAB_SIZE - 2) for _ in range(count)]


if __name__ == "__main__":
    main()
