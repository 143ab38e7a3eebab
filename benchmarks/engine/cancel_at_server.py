"""Measures how long a cancelled request still runs at an inference server.

A worker forwards to the real server, where a few requests run with the suite's 54M model. One of
them is cancelled. Then the benchmark polls the server for the number of running requests until it
has fallen by one. Times are in milliseconds, from just before the cancel is sent, and include the
time of polling. With `--apart` the server has one core, and all other processes have the other
cores, as if the server computed on a GPU. Without `--apart`, vLLM's threads use every core, and at
times nothing else runs for half a second. The model is not smaller, because a server makes the
tokens of a tiny model faster than it can send them, and then its number of running requests is
seconds late.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks.engine.cancel import percentile
from benchmarks.lib.models import CACHE, MODELS, model_dir
from promptq import Client
from promptq.shared.protocol.request import SamplingParams
from promptq.shared.server.embedded import EmbeddedServer
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.upstream.dialects.dialect import Dialect
from promptq.worker.upstream.dialects.llama_cpp import LlamaCppDialect
from promptq.worker.upstream.dialects.transport import Server
from promptq.worker.upstream.dialects.vllm import VllmDialect
from tests.programs.engines.real_servers import NAMES, RealServer, real_server, why_missing
from tests.support.processes import started
from tests.support.roles import as_role, bring_in_roles

DIALECTS: dict[str, Any] = {"vllm": VllmDialect, "llama.cpp": LlamaCppDialect}
_AT_ONCE = 4
_ASK_SECONDS = 0.005
_ENDLESS: dict[str, Any] = {
    "max_tokens": 900,
    "temperature": 0.0,
    "logit_bias": {"0": -100, "2": -100},
}


def measure(server: RealServer, client: Client, count: int) -> list[float]:
    """Returns the seconds that each cancel took."""
    found = []
    for _ in range(count):
        ids = [client.enqueue("Once", **_ENDLESS) for _ in range(_AT_ONCE)]
        for request_id in ids:
            next(client.stream(request_id))
        while server.num_running() != _AT_ONCE:
            pass
        cancelled_at = time.perf_counter()
        client.cancel(ids[0])
        _until_one_less(server)
        found.append(time.perf_counter() - cancelled_at)
        for request_id in ids[1:]:
            client.cancel(request_id)
        while server.num_running():
            pass
    return found


def _until_one_less(server: RealServer) -> None:
    while server.num_running() >= _AT_ONCE:
        time.sleep(_ASK_SECONDS)


async def measure_directly(server: RealServer, dialect: Dialect, count: int) -> list[float]:
    """Measures a cancel by closing a stream's connection, without Redis and a worker."""
    http = Server(server.url)
    found = []
    for _ in range(count):
        reading = [asyncio.create_task(_read(http, dialect, number)) for number in range(_AT_ONCE)]
        while await asyncio.to_thread(server.num_running) != _AT_ONCE:
            pass
        closed_at = time.perf_counter()
        reading[0].cancel()
        await asyncio.to_thread(_until_one_less, server)
        found.append(time.perf_counter() - closed_at)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        while await asyncio.to_thread(server.num_running):
            pass
    await http.close()
    return found


async def _read(http: Server, dialect: Dialect, number: int) -> None:
    params = SamplingParams(temperature=0.0, logit_bias=_ENDLESS["logit_bias"])
    request = EngineRequest(
        sequence_id=number,
        prompt_token_ids=[5, 6, 7, number],
        params=params,
        seed=0,
        max_tokens=_ENDLESS["max_tokens"],
        order=(0.0, str(number)),
    )
    async with aclosing(dialect.generate(http, request, [], "m")) as chunks:
        async for _ in chunks:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cancel-at-server", description=__doc__
    )
    parser.add_argument("--cancels", type=int, default=30)
    parser.add_argument("--apart", action="store_true", help="give the server a separate core")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    of_server, of_others = (cores[:1], cores[1:]) if options.apart else (cores, cores)
    if options.apart:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[0])
    model = model_dir(MODELS["54m"], CACHE)
    for name in NAMES:
        if why := why_missing(name):
            print(f"{name}: {why}")
            continue
        os.sched_setaffinity(0, of_server)
        with (
            tempfile.TemporaryDirectory() as folder,
            real_server(name, Path(folder), model=model) as server,
        ):
            os.sched_setaffinity(0, of_others)
            _measure_both(name, server, model, options.cancels)


def _measure_both(name: str, server: RealServer, model: Path, count: int) -> None:
    flags = ("--engine", name, "--dtype", "float32", "--model", str(model))
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer() as redis:
        bring_in_roles(redis.url)
        with (
            started(Path(folder), redis.url, *flags, "--upstream", server.url),
            Client(as_role("operator", redis.url)) as client,
        ):
            _tell(f"{name}, cancelled", measure(server, client, count))
            directly = measure_directly(server, DIALECTS[name](is_exact=True), count)
            _tell(f"{name}, closed directly", asyncio.run(directly))


def _tell(what: str, seconds: list[float]) -> None:
    p50, p95 = (1000 * percentile(seconds, it) for it in (0.5, 0.95))
    most = 1000 * max(seconds)
    print(f"{what}: p50 {p50:.0f} ms, p95 {p95:.0f} ms, most {most:.0f} ms of {len(seconds)}")


if __name__ == "__main__":
    main()
