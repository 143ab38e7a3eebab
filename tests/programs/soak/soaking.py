"""Measures whether memory and latency stay flat under steady load."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import redis.asyncio

from promptq.producer.clients.async_client import AsyncClient
from promptq.producer.commands.local_fleet.child_process import ChildProcess, worker_command
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.worker_stats import SAMPLE_MS
from promptq.shared.server.embedded import EmbeddedServer
from tests.support.processes import hear_signals
from tests.support.roles import as_role, bring_in_roles

FLAT_SHARE_PER_HOUR = 0.02
_SURE = 2.0


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through the second half of the samples, by least squares."""

    mean: float
    slope_per_hour: float
    error_per_hour: float
    """Standard error of the slope, corrected for the correlation of successive samples."""

    @property
    def share_per_hour(self) -> float:
        """Growth in an hour, as a share of the mean."""
        return self.slope_per_hour / self.mean if self.mean else 0.0

    @property
    def is_flat(self) -> bool:
        """Whether the line grows by less than 2 % an hour, or at most twice its standard error."""
        is_small = self.share_per_hour < FLAT_SHARE_PER_HOUR
        return is_small or self.slope_per_hour <= _SURE * self.error_per_hour


def trend_of(seconds: Sequence[float], values: Sequence[float]) -> Trend:
    """Returns the trend of the second half. The first half is left out, because caches fill then.
    Needs 8 samples or more."""
    if len(values) < 8:
        raise ValueError(f"{len(values)} samples are fewer than the 8 that a trend needs")
    half = len(values) // 2
    hours = [it / 3600 for it in seconds[half:]]
    kept = list(values[half:])
    count = len(kept)
    mean_hour, mean = sum(hours) / count, sum(kept) / count
    spread = sum((hour - mean_hour) ** 2 for hour in hours)
    slope = sum((h - mean_hour) * (v - mean) for h, v in zip(hours, kept, strict=True)) / spread
    rest = [v - mean - slope * (h - mean_hour) for h, v in zip(hours, kept, strict=True)]
    square = sum(it * it for it in rest)
    alike = sum(a * b for a, b in pairwise(rest)) / square if square else 0.0
    alike = min(max(alike, 0.0), 0.95)
    independent = max(count * (1 - alike) / (1 + alike), 3.0)
    error = math.sqrt(square / count / (independent - 2) / (spread / count))
    return Trend(mean, slope, error)


SAMPLE_SECONDS = 5.0
_CONFIG = {"log_ttl_ms": 5_000, "result_ttl_ms": 30_000}
"""With these, the data of finished requests stops growing after a minute."""

_WARM_UP_REQUESTS = 5


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to one queue, evenly spaced."""

    queue: str
    options: tuple[str, ...]
    rate: float
    """Requests a second."""
    max_tokens: int


LOADS = [
    Load("free", ("--model", "model-free", "--kv-cache-memory", "128K"), rate=8.0, max_tokens=40),
    Load("shipped", ("--kv-cache-memory", "8M"), rate=1.0, max_tokens=80),
]
"""The KV caches are small, so that all of their blocks have been used after a minute. Until then a
worker's memory grows, because it keeps finished prompts in the cache."""


@dataclass(slots=True)
class Samples:
    """Rows of measurements by name, all at the same times."""

    seconds: list[float] = field(default_factory=list)
    rows: dict[str, list[float]] = field(default_factory=dict)
    num_requests: int = 0
    num_wrong: int = 0

    def add(self, seconds: float, values: dict[str, float]) -> None:
        self.seconds.append(seconds)
        for name, value in values.items():
            self.rows.setdefault(name, []).append(value)


class _Latencies:
    """Latencies of the requests of one load since the last sample, in ms."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.whole: list[float] = []
        self._last = (0.0, 0.0)

    def take(self) -> tuple[float, float]:
        """Returns the medians to the first event and to the end; old ones if none has ended."""
        if self.first and self.whole:
            self._last = statistics.median(self.first), statistics.median(self.whole)
        self.first, self.whole = [], []
        return self._last


async def soak(seconds: float, folder: Path, faster: float = 1.0) -> Samples:
    """Run for `seconds`, at `faster` times the rates. Returns samples, which begin when all
    processes are warm."""
    samples = Samples()
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedServer())
        bring_in_roles(server.url)
        control = await stack.enter_async_context(redis.asyncio.Redis.from_url(server.url))
        await control.config_set("slowlog-max-len", 0)  # on a busy machine it would grow
        pids, clients = {}, {}
        for load in LOADS:
            await control.hset(Keys(load.queue).config, mapping=_CONFIG)
            log = folder / f"{load.queue}.log"
            stack.enter_context(_worker(load, as_role("worker", server.url), log))
            url = as_role("producer", server.url)
            client = await stack.enter_async_context(AsyncClient(url, load.queue))
            for seed in range(_WARM_UP_REQUESTS):
                await client.generate("Once", seed=seed, max_tokens=load.max_tokens)
            await _fill_statistics(control, Keys(load.queue))
            clients[load.queue] = client
            pids[load.queue] = (await client.stats()).workers[0].pid
        latencies = {load.queue: _Latencies() for load in LOADS}
        sending = [
            asyncio.create_task(
                _send(
                    replace(load, rate=load.rate * faster),
                    clients[load.queue],
                    latencies[load.queue],
                    samples,
                )
            )
            for load in LOADS
        ]
        try:
            await _sample(seconds, samples, control, pids, latencies, sending)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
    return samples


async def _fill_statistics(control: redis.asyncio.Redis, keys: Keys) -> None:
    """Fills the statistics with entries for an hour, because until then they would grow."""
    latest: list[tuple[bytes, dict[bytes, bytes]]] = []
    while not (latest and latest[0][1][b"ttft_p50_ms"]):  # so that each entry has the usual size
        await asyncio.sleep(1.0)
        latest = await control.xrevrange(keys.statistics, count=1)
    entry_id, fields = latest[0]
    at = int(entry_id.split(b"-")[0])
    pipeline = control.pipeline()
    pipeline.delete(keys.statistics)
    for before in range(3_600_000 - SAMPLE_MS, -1, -SAMPLE_MS):
        pipeline.xadd(keys.statistics, fields, id=f"{at - before}-0")
    await pipeline.execute()


async def _sample(
    seconds: float,
    samples: Samples,
    control: redis.asyncio.Redis,
    pids: dict[str, int],
    latencies: dict[str, _Latencies],
    sending: list[asyncio.Task[None]],
) -> None:
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        await asyncio.sleep(SAMPLE_SECONDS - passed % SAMPLE_SECONDS)
        for task in sending:
            if task.done():
                task.result()  # raises the exception with which the task ended
        info = await control.info("memory")
        values = {
            "server: used memory, MiB": info["used_memory"] / 2**20,
            "server: resident, MiB": info["used_memory_rss"] / 2**20,
        }
        for queue, pid in pids.items():
            values[f"worker {queue}: resident, MiB"] = resident_bytes(pid) / 2**20
            first, whole = latencies[queue].take()
            values[f"{queue}: to the first event, ms"] = first
            values[f"{queue}: whole request, ms"] = whole
        samples.add(time.monotonic() - started, values)


async def _send(load: Load, client: AsyncClient, latencies: _Latencies, samples: Samples) -> None:
    """Send at the load's rate, however long the answers take."""
    rng = random.Random(load.queue)
    async with asyncio.TaskGroup() as group:
        due = time.monotonic()
        while True:
            due += 1 / load.rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            prompt = "".join(rng.choices("abcdefgh ", k=rng.randint(5, 60)))
            group.create_task(_ask(prompt, load, client, latencies, samples))


async def _ask(
    prompt: str, load: Load, client: AsyncClient, latencies: _Latencies, samples: Samples
) -> None:
    sent = time.monotonic()
    request_id = await client.enqueue(prompt, max_tokens=load.max_tokens, ignore_eos=True)
    first, count = 0.0, 0
    async for event in client.stream(request_id):
        first = first or time.monotonic()
        count += len(event.token_ids)
    latencies.first.append((first - sent) * 1000)
    latencies.whole.append((time.monotonic() - sent) * 1000)
    samples.num_requests += 1
    samples.num_wrong += count != load.max_tokens


@contextmanager
def _worker(load: Load, url: str, log: Path) -> Iterator[ChildProcess]:
    command = worker_command(["--redis", url, "--queue", load.queue, *load.options])
    with log.open("w") as file:
        worker = ChildProcess(command, {}, lambda line: print(line, file=file, flush=True))
        try:
            yield worker
        finally:
            worker.kill()


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process (`VmRSS`) in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")


def report(samples: Samples) -> tuple[str, bool]:
    """Returns a table of the trends, and whether all are flat and all answers complete."""
    lines = [
        f"soak: {samples.seconds[-1]:.0f} s, {samples.num_requests:,} requests,"
        f" {samples.num_wrong:,} of them not whole",
        f"  {'second half':34} {'mean':>10} {'an hour':>10} {'± ':>8}",
    ]
    all_flat = True
    for name, values in samples.rows.items():
        trend = trend_of(samples.seconds, values)
        all_flat = all_flat and trend.is_flat
        error = trend.error_per_hour / trend.mean if trend.mean else 0.0
        lines.append(
            f"  {name:34} {trend.mean:10,.2f} {trend.share_per_hour:+10.1%} {error:8.1%}"
            f"  {'flat' if trend.is_flat else 'GROWS'}"
        )
    return "\n".join(lines), all_flat and not samples.num_wrong


def main() -> int:
    """Run the command. Returns the exit code: 1 if memory or latency grows, or if an answer was not
    complete."""
    hear_signals()
    parser = argparse.ArgumentParser(prog="python -m tests soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument(
        "--faster", type=float, default=1.0, help="multiply the rates of requests by this"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="promptq-soak-") as folder:
        samples = asyncio.run(soak(options.seconds, Path(folder), options.faster))
    table, is_well = report(samples)
    print(table)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
