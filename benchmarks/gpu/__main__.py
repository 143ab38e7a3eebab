"""Checks and measures the engine on a GPU: `python -m benchmarks.gpu`, in less than nine minutes.

Needs PyTorch, Triton and transformers. First the kernels are held against references, and whole
models against `generate`; then a random 8B model of Qwen3's shape is measured against what the
device reaches in the same run, and against transformers' continuous batching. With `--tiny --device
cpu` all of it runs on a small model, in Triton's interpreter, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.measures import Figure
    from benchmarks.gpu.models import Bench
    from benchmarks.gpu.timing import Ceilings

TARGETS = {"decode": 0.8, "prefill": 0.5, "peer": 2.5}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model and short lengths")
    parser.add_argument("--seconds", type=float, default=480, help="start nothing after this long")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    from benchmarks.gpu.bare import stand_in

    stand_in()  # before anything of the engine is imported
    report = Report(options.seconds)
    measure(report, options.device, options.tiny, peers=not options.without_peers)
    if options.json is not None:
        options.json.write_text(json.dumps(report.figures, indent=1))
    print(f"\n{time.perf_counter() - report.started:.0f} s in all")
    for failure in report.failures:
        print(f"FAILED: {failure}")
    return 1 if report.failures else 0


class Report:
    """Prints as it goes, so that a run cut short still says what it found."""

    def __init__(self, seconds: float) -> None:
        self.started = time.perf_counter()
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []
        self._seconds = seconds

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a part; a failure is noted, and the rest goes on. None if there is no result."""
        if time.perf_counter() - self.started > self._seconds:
            print(f"{name}: no time left")
            return None
        began = time.perf_counter()
        print(f"{name} ...", flush=True)
        try:
            result = work()
        except Exception as error:
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            print(f"  FAILED: {type(error).__name__}: {error}"[:600])
            return None
        print(f"  ({time.perf_counter() - began:.1f} s)", flush=True)
        return result

    def say(self, name: str, value: Any, text: str) -> None:
        self.figures[name] = value
        print(f"  {name}: {text}", flush=True)


def measure(report: Report, device_name: str, tiny: bool, *, peers: bool) -> None:
    import torch

    from benchmarks.gpu import checks, measures, models, throughput, timing

    device = torch.device(device_name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    size = models.TINY if tiny else models.LARGE
    repeats = 1 if tiny else 20

    for name, work in (
        ("kernels", lambda: checks.check_kernels(device, tiny=tiny)),
        ("whole models", lambda: checks.check_models(device, tiny=tiny)),
    ):
        result = report.part(name, work)
        if result is None:
            return  # what is wrong need not be fast
        report.say(name, result, result)

    ceilings = report.part("ceilings", lambda: timing.measure_ceilings(device, tiny=tiny))
    if ceilings is None:
        return
    report.say("copy", ceilings.bytes_per_second, f"{ceilings.bytes_per_second / 1e12:.3f} TB/s")
    report.say("bf16 product", ceilings.flops, f"{ceilings.flops / 1e12:.1f} TFLOP/s")

    alone = partial(measures.measure_attention, size, ceilings, device, repeats=repeats)
    say_all(report, report.part("attention alone", alone), None)
    loaded = report.part("model", lambda: models.build(size, device))
    if loaded is None:
        return
    steps = report.part("check at load", lambda: models.Bench(loaded, size, device))
    if steps is not None:
        measure_steps(report, steps, ceilings, repeats)
    del steps
    if device.type == "cuda":
        torch.cuda.empty_cache()

    ours = []
    for title, compiled in (("engine", False), ("engine, compiled", True)):
        work = partial(throughput.engine_rate, loaded, size, device, compiled=compiled)
        result = report.part(title, work)
        if result is not None:
            rate, loading = result
            ours.append(rate)
            report.say(title, rate, f"{rate:.0f} tokens/s (loaded in {loading:.1f} s)")
    torch.compiler.reset()  # no peer shall find what was compiled for us
    rates = []
    for name, settings in throughput.peer_settings(device).items() if peers else ():
        title = f"continuous batching, {name}"
        rate = report.part(title, lambda s=settings: throughput.peer_rate(loaded, size, device, s))
        if rate is not None:
            rates.append(rate)
            report.say(title, rate, f"{rate:.0f} tokens/s")
    if ours and rates:
        ratio = max(ours) / max(rates)
        report.say("over the best", ratio, f"{ratio:.2f} (wanted: {TARGETS['peer']})")


def measure_steps(report: Report, bench: Bench, ceilings: Ceilings, repeats: int) -> None:
    from benchmarks.gpu import measures

    for name, measured in (
        ("decode", measures.measure_decode),
        ("prefill", measures.measure_prefill),
        ("decode, compiled", partial(measures.measure_decode, compiled=True)),
        ("prefill, compiled", partial(measures.measure_prefill, compiled=True)),
    ):
        figures = report.part(name, partial(measured, bench, ceilings, repeats=repeats))
        say_all(report, figures, TARGETS[name.split(",")[0]])


def say_all(report: Report, figures: list[Figure] | None, target: float | None) -> None:
    for figure in figures or []:
        share = figure.share_of_floor
        text = f"{figure.took:.3f} ms"
        if share is not None:
            text += f", at least {figure.floor:.3f}: {share:.0%} of what is possible"
        if target is not None:
            text += f" (wanted: {target:.0%})"
        report.say(figure.name, {"ms": figure.took, "share": share}, text)


if __name__ == "__main__":
    sys.exit(main())
