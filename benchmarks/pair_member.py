"""One of two checkouts that are measured in turns: its worker, and a client that it is told to use.

Run by `benchmarks.pairs` with the interpreter of the checkout: `pair_member.py REDIS_URL MODEL`. It
keeps to what releases since 0.2.0 have in common. Each line of input names requests (`solo` or
`burst`, and a seed), and each line of output has their figures as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time

from promptq import AsyncClient

_VOCAB_SIZE = 32_000
_BATCH = 64


def main() -> None:
    url, model = sys.argv[1:3]
    flags = ["--model", model, "--dtype", "bfloat16", "--max-num-seqs", str(_BATCH)]
    flags += ["--max-model-len", "4096", "--kv-cache-memory", str(2**29)]
    command = [sys.executable, "-m", "promptq.worker", "--redis", url, *flags]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    if not worker.stdout.readline().startswith(b"ready"):
        sys.exit("the worker ended while it started")
    print("ready", flush=True)
    try:
        asyncio.run(_answer(url))
    finally:
        worker.terminate()
        worker.wait()


async def _answer(url: str) -> None:
    async with AsyncClient(url) as client:
        while asked := await asyncio.to_thread(sys.stdin.readline):
            draw = random.Random(asked)
            if asked.startswith("solo"):
                requests = [(_tokens(draw, 128), 48)]
            else:
                sizes = [(draw.randint(32, 256), draw.randint(32, 192)) for _ in range(_BATCH)]
                requests = [(_tokens(draw, prompt), output) for prompt, output in sizes]
            started = time.perf_counter()
            firsts = sorted(await asyncio.gather(*(_first(client, *it) for it in requests)))
            seconds = time.perf_counter() - started
            told = {
                "first_token_p50": firsts[len(firsts) // 2],
                "first_token_p95": firsts[int(len(firsts) * 0.95)],
                "tokens_per_second": sum(output for _, output in requests) / seconds,
            }
            print(json.dumps(told), flush=True)


async def _first(client: AsyncClient, prompt: list[int], num_output: int) -> float:
    """Seconds to the first token of a request, once it has ended."""
    started, first, num_tokens = time.perf_counter(), 0.0, 0
    fields = {"max_tokens": num_output, "temperature": 0.0, "ignore_eos": True}
    async for event in client.stream(await client.enqueue(prompt, **fields)):
        if event.token_ids and not num_tokens:
            first = time.perf_counter() - started
        num_tokens += len(event.token_ids)
    if num_tokens != num_output:
        raise RuntimeError(f"{num_tokens} tokens came of {num_output}")
    return first


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(1, _VOCAB_SIZE - 2) for _ in range(count)]


if __name__ == "__main__":
    main()
