"""Measures promptq side by side with vLLM, llama.cpp, transformers and BullMQ."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib import peers
from benchmarks.lib.models import CACHE, MODELS
from benchmarks.table import plot
from benchmarks.table import printing as table
from benchmarks.table.floor import torch_dtype
from benchmarks.table.measuring import Plan, Run, carry_out
from benchmarks.table.registry import ROWS
from benchmarks.table.workloads import WORKLOADS
from promptq.producer.commands.screens.terminal import console_for_list

_WORKLOADS = [*WORKLOADS, "poisson", "queue"]


def main() -> None:
    plan, options = _read_options()
    # Ending it ends the row that runs, too: an engine left over would spoil the next measurement.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = console_for_list()
    plan.cache.mkdir(parents=True, exist_ok=True)
    run = carry_out(plan, lambda line: console.print(line, style="dim", highlight=False))
    measured = run.measured
    table.print_results(console, measured, run.missing)
    console.print(_rates(run, plan))
    if options.json:
        options.json.write_text(json.dumps(_report(plan, run), indent=1) + "\n")
    if options.plot:
        plot.plot(measured, options.plot)


def _rates(run: Run, plan: Plan) -> str:
    rates = run.rates
    lines = [
        f"memory reads at {rates.bytes_per_second / 1e9:.1f} GB/s, the matrix product runs at "
        f"{rates.operations_per_second / 1e12:.2f} TFLOP/s, in {torch_dtype()}",
        f"vLLM and transformers compute in {torch_dtype()}, all others in bfloat16",
    ]
    if plan.shorten > 1:
        lines.append(f"outputs are {plan.shorten} times shorter than the workloads specify")
    for model in plan.models:
        floor = f"{run.floor_seconds(model) * 1000:.1f} ms"
        lines.append(f"floor of a decode step, {model}, full batch at length 250: {floor}")
    lines += [
        f"poisson, {model}: {rate:.1f} requests a second" for model, rate in run.arrivals.items()
    ]
    return "\n".join(lines)


def _report(plan: Plan, run: Run) -> dict[str, Any]:
    return {
        "machine": {"cores": os.cpu_count(), "processor": _processor()},
        "seed": plan.seed,
        "shorten": plan.shorten,
        "rates": {
            "bytes_per_second": run.rates.bytes_per_second,
            "operations_per_second": run.rates.operations_per_second,
        },
        "torch_dtype": torch_dtype(),
        "floor_seconds": {model: run.floor_seconds(model) for model in plan.models},
        "arrivals_per_second": run.arrivals,
        "rounds": [
            {"model": model, "workload": workload, "row": row, "figures": rounds}
            for (model, workload, row), rounds in run.rounds.items()
        ],
        "missing": [
            {"model": model, "row": row, "reason": reason}
            for (model, row), reason in run.missing.items()
        ],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "")


def _read_options() -> tuple[Plan, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks table", description=__doc__)
    parser.add_argument(
        "--models", default="54m,473m", help=f"some of {', '.join(MODELS)}; default: %(default)s"
    )
    parser.add_argument("--workloads", default=",".join(_WORKLOADS), help="default: %(default)s")
    parser.add_argument("--rows", default=",".join(ROWS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="figures are medians over rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="length of the workload poisson"
    )
    parser.add_argument(
        "--rate", type=float, help="requests/s of poisson; default: by the peers' bursts"
    )
    parser.add_argument("--queue-requests", type=int, default=20_000)
    parser.add_argument(
        "--shorten",
        type=int,
        default=1,
        help="divide the length of outputs by this, on a slow machine",
    )
    parser.add_argument(
        "--quick", action="store_true", help="54m, one round, burst, solo and queue, few requests"
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for models and logs")
    parser.add_argument("--peers", type=Path, default=peers.DEFAULT)
    parser.add_argument("--json", type=Path, default=CACHE / "bench.json")
    parser.add_argument("--plot", type=Path, help="also draw a PNG or SVG file (extra `bench`)")
    options = parser.parse_args()
    if options.quick:
        options.models, options.workloads = "54m", "burst,solo,queue"
        options.rounds, options.queue_requests = 1, 5000

    def chosen(name: str, known: list[str]) -> list[str]:
        names: list[str] = getattr(options, name).split(",")
        for each in names:
            if each not in known:
                parser.error(f"--{name}: {each!r} is not one of {', '.join(known)}")
        return names

    return Plan(
        models=chosen("models", list(MODELS)),
        workloads=chosen("workloads", _WORKLOADS),
        rows=chosen("rows", list(ROWS)),
        rounds=options.rounds,
        seed=options.seed,
        seconds=options.seconds,
        rate=options.rate,
        queue_requests=options.queue_requests,
        shorten=options.shorten,
        cache=options.cache.resolve(),
        peers=options.peers.resolve(),
        log=options.cache.resolve() / "rows.log",
    ), options


if __name__ == "__main__":
    main()
