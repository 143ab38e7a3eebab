"""Compares two workers with one, each with the same share of the machine.

Bursts go in turns to one worker and to both, on one server. The second worker is stopped while one
worker is measured. A real model computes nearly all the time, so each worker has a separate core.
The model-free engine has nothing to compute, so server and client need as much CPU time as the
workers. So a control group limits each worker to a part of a core, and root must run the benchmark.
`--share` sets the part, also for a real model: on a machine with two cores, two workers with a
whole core each leave none to server and client.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.lib.children import child
from benchmarks.lib.models import CACHE, MODELS, model_dir
from promptq import Client
from promptq.shared.server.embedded import EmbeddedServer

_GROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 20_000
_BURSTS = {"54m": (96, 24), "model-free": (6000, 1)}
"""The number of requests, and the tokens of each."""
_BULK = 500
_OPTIONS = ("--speculative-tokens", "0", "--max-num-seqs", "8")
"""Few slots, so that both workers have work until the end."""


def burst_seconds(url: str, count: int, num_tokens: int) -> float:
    """Returns the seconds from the first request's enqueueing until the last one has its result."""
    request = {
        "prompt": "Once upon a time",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    with Client(url) as client:
        began = time.perf_counter()
        for first in range(0, count, _BULK):
            client.enqueue_many([request] * min(_BULK, count - first))
        while (stats := client.stats()).waiting or stats.active:
            time.sleep(0.01)
        return time.perf_counter() - began


@contextmanager
def group_of(pid: int, share: float) -> Iterator[None]:
    """Limit a process to this share of a core."""
    old = _GROUPS / "cpu"
    folder = (old if old.is_dir() else _GROUPS) / f"promptq-bench-{pid}"
    folder.mkdir()
    try:
        quota = int(share * _PERIOD_US)
        if old.is_dir():
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        (folder / "cgroup.procs").write_text(str(pid))
        yield
        (folder.parent / "cgroup.procs").write_text(str(pid))
    finally:
        folder.rmdir()


def keep_to_core(pid: int, core: int) -> None:
    """Bind all threads of a process to a core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def main() -> None:
    """Measure in alternating pairs, and compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling-out", description=__doc__)
    parser.add_argument("--model", choices=_BURSTS, default="54m")
    parser.add_argument(
        "--share",
        type=float,
        help="share of a core for each worker; default without a model: a quarter",
    )
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    is_real = options.model in MODELS
    model = str(model_dir(MODELS[options.model], CACHE)) if is_real else options.model
    count, num_tokens = _BURSTS[options.model]
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedServer()).url
        command = ("promptq.worker", "--redis", url, "--model", model, *_OPTIONS)
        workers = []
        for core in range(2):
            pid, _ = stack.enter_context(child(*command, OMP_NUM_THREADS="1"))
            workers.append(pid)
            stack.callback(os.kill, pid, signal.SIGCONT)  # or it could not end
            if is_real:
                keep_to_core(pid, core)
            if (share := options.share or (None if is_real else 0.25)) is not None:
                stack.enter_context(group_of(pid, share))

        def seconds(num_workers: int) -> float:
            os.kill(workers[1], signal.SIGCONT if num_workers == 2 else signal.SIGSTOP)
            return burst_seconds(url, count, num_tokens)

        for num_workers in (2, 1):  # to warm up
            seconds(num_workers)
        ratios = []
        for nth in range(options.pairs):
            order = (1, 2) if nth % 2 == 0 else (2, 1)
            found = {num_workers: seconds(num_workers) for num_workers in order}
            ratios.append(found[1] / found[2])
            rates = [f"{count / found[num_workers]:,.1f}" for num_workers in (1, 2)]
            print(f"requests a second: {rates[0]} by one, {rates[1]} by two", flush=True)
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"{options.model}: two workers over one {statistics.median(ratios):.2f}, median of"
            f" {options.pairs} pairs (half of them {low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()
