"""Measures how long no token comes while one model replaces another on one device.

Both queues always have a backlog, so the models change as often as the worker's settings allow. The
time of a change is compared with the time of reading the weights from the page cache once. The
models have the same random weights and two names.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.lib.children import child
from benchmarks.lib.models import CACHE, MODELS, model_dir
from promptq import AsyncClient
from promptq.shared.server.embedded import EmbeddedServer

_STREAMS = 8
_MAX_TOKENS = 32
_TURN_SECONDS = "4"
_AWAY_SECONDS = 2.0


async def arrivals(url: str, num_changes: int) -> list[tuple[float, str]]:
    """Returns the time (`time.perf_counter()`) and the queue of each token, up to the last of
    `num_changes` changes."""
    arrived: list[tuple[float, str]] = []

    def note(queue: str) -> None:
        arrived.append((time.perf_counter(), queue))

    async def read_on(client: AsyncClient, queue: str) -> None:
        while True:
            request_id = await client.enqueue("Once upon a time", max_tokens=_MAX_TOKENS)
            async for _ in client.stream(request_id):
                note(queue)

    async with AsyncClient(url, "a") as a, AsyncClient(url, "b") as b:
        reading = [
            asyncio.create_task(read_on(client, queue))
            for client, queue in ((a, "a"), (b, "b"))
            for _ in range(_STREAMS)
        ]
        while len(longest_gaps(arrived)) < num_changes:
            await asyncio.wait(reading, timeout=1, return_when=asyncio.FIRST_COMPLETED)
            for task in reading:
                if task.done():
                    task.result()
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)
    return arrived


def longest_gaps(arrived: list[tuple[float, str]]) -> list[float]:
    """Returns the longest seconds without any token at each change from one model to the other.

    A change is over when a queue gets a token after some seconds without tokens. While one model is
    drained, tokens of both queues may come.
    """
    gaps: list[float] = []
    last = {"a": float("-inf"), "b": float("-inf")}
    longest, before = 0.0, arrived[0][0] if arrived else 0.0
    for at, queue in arrived:
        longest, before = max(longest, at - before), at
        if at - last[queue] > _AWAY_SECONDS and max(last.values()) > 0:
            gaps.append(longest)
            longest = 0.0
        last[queue] = at
    return gaps


def read_seconds(model: Path) -> float:
    """Returns the seconds in which the weights are read from the page cache into memory."""
    began = time.perf_counter()
    for file in model.glob("*.safetensors"):
        file.read_bytes()
    return time.perf_counter() - began


def swapping(url: str, folder: Path, *, overlaps: bool) -> AbstractContextManager[object]:
    """Run a worker of both models that swaps them as often as it can."""
    models = [word for name in ("a", "b") for word in ("--model", str(folder / name))]
    queues = ("--queue", "a", "--queue", "b", "--redis", url)
    turns = ("--swap-least-seconds", _TURN_SECONDS, "--swap-longest-wait", _TURN_SECONDS)
    more = ("--swap-overlap" if overlaps else "--no-swap-overlap", "--speculative-tokens", "0")
    return child("promptq.worker", *models, *queues, *turns, *more)


def main() -> None:
    """Measure once with both models in memory during a change, and once with one model at a
    time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks swap", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="54m")
    parser.add_argument("--changes", type=int, default=6)
    options = parser.parse_args()
    model = model_dir(MODELS[options.model], CACHE)
    with TemporaryDirectory() as made:
        for name in ("a", "b"):
            (Path(made) / name).symlink_to(model)
        for overlaps in (True, False):
            with EmbeddedServer() as server, swapping(server.url, Path(made), overlaps=overlaps):
                arrived = asyncio.run(arrivals(server.url, options.changes + 1))
            gaps = longest_gaps(arrived)[1:]  # at the first one, nothing runs yet
            read = statistics.median(read_seconds(model) for _ in range(7))
            what = "both in memory during a change" if overlaps else "one at a time"
            median = statistics.median(gaps)
            print(
                f"{options.model}, {what}: no token for {median:.2f} s (median of {len(gaps)}"
                f" changes, {min(gaps):.2f} to {max(gaps):.2f}); reading the weights"
                f" takes {read:.3f} s, so {median / read:.1f} times as long",
                flush=True,
            )


if __name__ == "__main__":
    main()
