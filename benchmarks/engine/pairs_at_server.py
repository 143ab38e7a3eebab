"""Compares vLLM's server alone with the same server behind a worker, in turns.

Bursts of the batch's size go to the same server in alternating order: directly over HTTP, and
through a worker. All bursts have the same lengths and different tokens, so the prefix cache has no
prompt of an earlier burst. Other load of the machine affects both kinds of bursts, and differences
between two starts of a server affect neither. Each ratio is the worker's figure divided by the
figure of direct HTTP. With `--schema`, the server masks all tokens, and direct HTTP sends the
schema as vLLM's own field.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.models import MODELS, Shape, model_dir
from benchmarks.lib.serving import free_port, running_server
from benchmarks.lib.streaming import Stream, drive, wait_until_healthy
from benchmarks.lib.vllm_command import vllm_command
from benchmarks.table import workloads
from benchmarks.table.floor import torch_dtype
from benchmarks.table.jobs import Job
from benchmarks.table.measuring import MAX_MODEL_LEN
from benchmarks.table.registry import vllm_python, vllm_variables
from benchmarks.table.rows import vllm_server, whole_path
from benchmarks.table.rows.whole_path import start_worker
from benchmarks.table.statistics import Figures, figures
from promptq import AsyncClient
from promptq.shared.server.embedded import EmbeddedServer
from promptq.worker.upstream.server_process import server_environment

_ROOT = Path(__file__).parents[1]

_SCHEMA = {
    "type": "array",
    "items": {"type": "string", "minLength": 10, "maxLength": 60},
    "minItems": 100,
}
"""Longer than each output."""

_FIGURES = ("tokens_per_second", "first_token_p50", "first_token_p95")


async def measure(
    streams: Mapping[str, Stream], shape: Shape, pairs: int, shorten: int
) -> dict[str, list[Figures]]:
    """Send `pairs` bursts to each of the `streams`. Returns the figures of each burst, by the name
    of the stream."""
    found: dict[str, list[Figures]] = {name: [] for name in streams}
    for number in range(-1, pairs):  # the first one warms up
        names = list(streams) if number % 2 else list(streams)[::-1]
        for name in names:
            burst = workloads.shortened(workloads.burst(shape, number, f" {name}"), shorten)
            outcome = figures(await drive(burst, streams[name]))
            if number >= 0:
                found[name].append(outcome)
                told = ", ".join(f"{it} {outcome[it]:.4g}" for it in _FIGURES)
                print(f"pair {number + 1}/{pairs}, {name}: {told}", flush=True)
    return found


def tell(found: Mapping[str, list[Figures]]) -> None:
    direct, behind = found["HTTP"], found["worker"]
    for name in _FIGURES:
        ratios = sorted(it[name] / other[name] for it, other in zip(behind, direct, strict=True))
        medians = [statistics.median(it[name] for it in each) for each in (behind, direct)]
        print(
            f"{name}: {statistics.median(ratios):.3f} (of {len(ratios)} pairs, {ratios[0]:.3f} to"
            f" {ratios[-1]:.3f}); medians {medians[0]:.4g} and {medians[1]:.4g}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks pairs-at-server", description=__doc__
    )
    parser.add_argument("--model", choices=[*MODELS], default="473m")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--shorten", type=int, default=4, help="divide the length of outputs by this"
    )
    parser.add_argument("--schema", action="store_true", help="measure answers that obey a schema")
    options = parser.parse_args()
    shape = MODELS[options.model]
    job = Job(
        model=str(model_dir(shape, _ROOT / ".cache")),
        max_num_seqs=shape.batch,
        kv_cache_bytes=shape.kv_cache_bytes,
        max_model_len=MAX_MODEL_LEN,
        workloads=[],
        peers=str(_ROOT / ".peers"),
        torch_dtype=torch_dtype(),
    )
    flags = ("--engine", "vllm", "--model", job.model, "--max-num-seqs", str(job.max_num_seqs))
    with EmbeddedServer() as redis, server_for_workers(job) as port:
        worker = start_worker(redis.url, *flags, "--upstream", f"http://127.0.0.1:{port}")
        try:
            tell(asyncio.run(_in_turns(redis.url, port, shape, options)))
        finally:
            worker.terminate()
            worker.wait()


@contextmanager
def server_for_workers(job: Job) -> Iterator[int]:
    """Runs vLLM's server with the options that a worker needs. Yields its port."""
    peers, port = Path(job.peers), free_port()
    python = vllm_python(peers)
    grammars = ("--structured-outputs-config", '{"backend": "guidance"}')
    command = vllm_command(str(python), job, port, "--enable-scale-out", *grammars)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**server_environment(), **vllm_variables(peers), "PATH": path}
    with running_server(command, environment) as server:
        asyncio.run(wait_until_healthy(port, lambda: server.poll() is None))
        yield port


async def _in_turns(
    url: str, port: int, shape: Shape, options: argparse.Namespace
) -> dict[str, list[Figures]]:
    direct: dict[str, Any] = {"structured_outputs": {"json": _SCHEMA}} if options.schema else {}
    form = {"type": "json_schema", "json_schema": {"name": "texts", "schema": _SCHEMA}}
    behind: dict[str, Any] = {"response_format": form} if options.schema else {}
    async with AsyncClient(url) as client:
        streams = {
            "HTTP": vllm_server.streams_of(port, **direct),
            "worker": whole_path.streams_of(client, **behind),
        }
        return await measure(streams, shape, options.pairs, options.shorten)


if __name__ == "__main__":
    main()
