"""Compares promptq's formats of weights with llama.cpp's, in turns.

All formats are loaded at the same time and measured in turns, so other load of the machine affects
all of them. Nothing is drafted. A rate is measured between the first and the last token; "prompt"
is the time to the first token after a prompt of 1,024 tokens. Ratios are medians of pairs. "What
memory allows" is the rate at which weights, K and V could be read, as measured before and after
each request. Each start is a separate process. "Memory" is how much the memory of a process grows
while the process loads the model, with an empty KV cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.lib.gguf_file import gguf_file
from benchmarks.lib.memory import watching_own_memory
from benchmarks.lib.models import CACHE, MODELS, VOCAB_SIZE, Shape, model_dir
from benchmarks.lib.peers import DEFAULT as PEERS
from benchmarks.lib.serving import free_port, running_server
from benchmarks.lib.streaming import drive, wait_until_healthy
from benchmarks.table import workloads
from benchmarks.table.floor import measure_reading
from benchmarks.table.jobs import Outcome, Workload
from benchmarks.table.rows import engine as engine_row
from benchmarks.table.rows import llama_server

_LENGTH = 2048
OURS = ("bf16", "int8", "int4")
PEER = ("Q8_0", "Q4_0")
RATIOS = {
    "solo": [("int8", "bf16"), ("int4", "bf16"), ("int8", "Q8_0"), ("int4", "Q4_0")],
    "prompt": [("int8", "bf16"), ("int4", "bf16"), ("int8", "Q8_0"), ("int4", "Q4_0")],
    "burst": [("int8", "bf16"), ("int4", "bf16")],
}

Contender = Callable[[Workload], Outcome]


def figure(workload: str, outcome: Outcome) -> float:
    """Returns tokens per second; for the workload `prompt`, the seconds to the first token."""
    traces = outcome.traces
    if workload == "prompt":
        return traces[0].events[0] - traces[0].submitted
    if workload == "burst":
        return sum(trace.num_tokens for trace in traces) / outcome.seconds
    events = traces[0].events
    return (traces[0].num_tokens - 1) / (events[-1] - events[0])


def ours(shape: Shape, folder: Path, format: str) -> Contender:
    sizes = (shape.batch, _LENGTH, shape.kv_cache_bytes // 2)
    loaded = engine_row.load(str(folder), *sizes, format)
    count = 0

    def measure(workload: Workload) -> Outcome:
        nonlocal count
        first_id = count + 1
        count += len(workload.requests)
        return engine_row.drive(loaded, workload, first_id)

    return measure


def theirs(stack: ExitStack, folder: Path, format: str) -> Contender:
    """Start llama.cpp's server with one slot. Returns a function that runs a workload on the
    server."""
    peer, port = PEERS / "llama", free_port()
    model = gguf_file(folder, peer / "gguf-py", format)
    words = llama_server.command(peer, model, port, 1, _LENGTH)
    server = stack.enter_context(running_server(words))
    asyncio.run(wait_until_healthy(port, lambda: server.poll() is None))
    return lambda workload: asyncio.run(drive(workload, llama_server.stream_from(port)))


def bytes_of_step(shape: Shape, format: str, workload: Workload) -> float:
    """Returns the bytes that promptq's average decode step reads for the one request of
    `workload`."""
    [request] = workload.requests
    length = len(request.prompt) + request.num_output // 2
    embedding = VOCAB_SIZE * shape.hidden
    layers = shape.num_active_parameters - embedding
    bits, kv_bytes = {"bf16": 16, "int8": 8, "int4": 4.5}[format], shape.kv_bytes_per_token
    if format == "int8":  # the KV cache too; a row of a head has its scale in bf16
        kv_bytes = kv_bytes * (shape.head_dim + 2) // (2 * shape.head_dim)
    return (layers * bits + embedding * (16 if format == "bf16" else 8)) / 8 + length * kv_bytes


def compare(name: str, pairs: list[tuple[float, float]]) -> str:
    ratios = sorted(one / other for one, other in pairs)
    return f"{name}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def measure_all(shape: Shape, folder: Path, rounds: int, bursts: int) -> None:
    with ExitStack() as stack:
        contenders = {format: ours(shape, folder, format) for format in OURS}
        if (PEERS / "llama" / "bin").exists():
            contenders |= {format: theirs(stack, folder, format) for format in PEER}
        for kind, count in (("solo", rounds), ("prompt", rounds), ("burst", bursts)):
            if count == 0:
                continue
            taking_part = [it for it in contenders if kind != "burst" or it in OURS]
            found: dict[str, list[float]] = {format: [] for format in taking_part}
            allowed: dict[str, list[float]] = {it: [] for it in OURS if kind == "solo"}
            for number in range(-1, count):  # the first one warms up
                for format in taking_part if number % 2 else taking_part[::-1]:
                    load = workloads.WORKLOADS[kind](shape, number)
                    is_floored = number >= 0 and format in allowed
                    before = measure_reading() if is_floored else 0.0
                    outcome = contenders[format](load)
                    if number >= 0:
                        found[format].append(figure(kind, outcome))
                    if is_floored:
                        reading = (before + measure_reading()) / 2
                        allowed[format].append(reading / bytes_of_step(shape, format, load))
            for format, figures in found.items():
                unit = "s" if kind == "prompt" else "tokens/s"
                print(f"{kind}, {format}: {statistics.median(figures):.3g} {unit}", flush=True)
            for one, other in RATIOS[kind]:
                if other in found:
                    pairs = list(zip(found[one], found[other], strict=True))
                    print(compare(f"{kind}, {one} over {other}", pairs), flush=True)
            for format, rates in allowed.items():
                pairs = list(zip(found[format], rates, strict=True))
                print(compare(f"{kind}, {format} over what memory allows", pairs), flush=True)


def start(folder: Path, format: str) -> None:
    """Load the model in this process, and print the seconds and the added bytes of memory as
    JSON."""
    import promptq.worker.engine.runner.load_runner  # noqa: F401  # the libraries, before

    before, began = _resident_bytes(), time.perf_counter()
    with watching_own_memory() as peak:
        engine_row.load(str(folder), 1, _LENGTH, 2**26, format)
    seconds = time.perf_counter() - began
    told = {"seconds": seconds, "bytes": _resident_bytes() - before, "bytes at most": peak[0]}
    print(json.dumps(told))


def starts(folder: Path, model: str, rounds: int) -> None:
    found: dict[str, list[dict[str, float]]] = {format: [] for format in OURS}
    for number in range(rounds):
        for format in OURS if number % 2 else OURS[::-1]:
            words = [sys.executable, "-m", __spec__.name, "--model", model, "--start", format]
            told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            found[format].append(json.loads(told.splitlines()[-1]))
    for name in ("seconds", "bytes", "bytes at most"):
        for format in OURS:
            median = statistics.median(it[name] for it in found[format])
            print(f"start, {format}: {median:,.4g} {name}")
        for format in OURS[1:]:
            pairs = [
                (one[name], other[name])
                for one, other in zip(found[format], found["bf16"], strict=True)
            ]
            print(compare(f"start, {name}, {format} over bf16", pairs), flush=True)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks formats", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="473m")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of solo requests and of prompts; at least 1"
    )
    parser.add_argument("--bursts", type=int, default=3, help="rounds of bursts")
    parser.add_argument("--starts", type=int, default=3, help="starts of each format")
    parser.add_argument("--start", choices=OURS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least one is needed")
    shape = MODELS[options.model]
    folder = model_dir(shape, CACHE)
    if options.start:
        start(folder, options.start)
        return
    starts(folder, options.model, options.starts)
    measure_all(shape, folder, options.rounds, options.bursts)


if __name__ == "__main__":
    main()
