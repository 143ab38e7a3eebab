"""Checks and measures the engine on a GPU.

Needs PyTorch, Triton and transformers. First the kernels are compared with references, and whole
models with `generate`. Then a random 8B model of Qwen3's shape is compared with the device's
limits, with transformers' continuous batching and, where it is installed, with vLLM. At the end a
table compares the figures with their targets. With `--fewer-bits`, the model is measured in other
formats instead, in about three minutes. With `--tiny --device cpu`, the whole program runs on a
small model, in Triton's interpreter, to try the program itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.measures import Figure
    from benchmarks.gpu.models import Bench, Size
    from benchmarks.gpu.timing import Ceilings
    from promptq.worker.engine.model.loading import LoadedModel

CONTINUOUS = "over transformers' continuous batching"
VLLM = {1: 1.2, 64: 1.0, 256: 1.0}
"""Targets by the number of requests at once, as multiples of vLLM's tokens a second."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use a small model and short lengths")
    parser.add_argument(
        "--seconds", type=float, default=400, help="start no part after this many seconds"
    )
    parser.add_argument("--without-peers", action="store_true", help="measure only promptq")
    parser.add_argument(
        "--fewer-bits",
        action="store_true",
        help="measure weights, K and V in formats other than bf16",
    )
    parser.add_argument(
        "--measure-what-is-wrong", action="store_true", help="continue when a check fails"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    from benchmarks.gpu.bare import stand_in

    stand_in()  # before anything of the engine is imported
    report = Report(options.seconds, options.json)
    device = device_of(options.device)
    if options.fewer_bits:
        measure_fewer_bits(
            report, device, options.tiny, whatever_is_wrong=options.measure_what_is_wrong
        )
    else:
        measure(
            report,
            device,
            options.tiny,
            peers=not options.without_peers,
            whatever_is_wrong=options.measure_what_is_wrong,
        )
        report.print_table()
    report.write()
    print(f"\n{time.perf_counter() - report.started:.0f} s in all")
    for failure in report.failures:
        print(f"FAILED: {failure}")
    return 1 if report.failures else 0


class Report:
    """Prints and writes results as they come, so that an interrupted run leaves its results."""

    def __init__(self, seconds: float, path: Path | None) -> None:
        self.started = time.perf_counter()
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []
        self.table: dict[str, tuple[float, float | None, str]] = {}
        """By name: the target, the figure, and the reason if there is no figure."""
        self._seconds = seconds
        self._path = path

    def write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self.figures, indent=1))

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Run a part, and return its result. If the part fails, record the failure and return None,
        so that the other parts still run."""
        if time.perf_counter() - self.started > self._seconds:
            print(f"{name}: no time left")
            return None
        self.write()
        began = time.perf_counter()
        print(f"{name} ...", flush=True)
        try:
            result = work()
        except Exception as error:
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            print(f"  FAILED: {type(error).__name__}: {error}"[:4000])
            traceback.print_tb(error.__traceback__, limit=-6, file=sys.stdout)
            return None
        print(f"  ({time.perf_counter() - began:.1f} s)", flush=True)
        return result

    def want(self, name: str, wanted: float) -> None:
        """Set the target of a figure. The table then has a row for the figure, even without a
        measurement."""
        self.table[name] = (wanted, None, "no time left, or an error above")

    def reach(self, name: str, figure: float | None, why_none: str = "") -> None:
        wanted, before, _ = self.table[name]
        figures = [it for it in (figure, before) if it is not None]  # the best of some ways counts
        self.table[name] = (wanted, max(figures, default=None), why_none)

    def print_table(self) -> None:
        self.figures["table"] = {}
        print(f"\n{'':56} {'target':>8} {'figure':>8}")
        for name, (wanted, figure, why_none) in self.table.items():
            if figure is None:
                verdict, shown = f"not measured: {why_none}", "-"
            else:
                verdict, shown = ("pass" if figure >= wanted else "miss"), f"{figure:.2f}"
            self.figures["table"][name] = {"target": wanted, "figure": figure, "verdict": verdict}
            print(f"{name:56} {wanted:8.2f} {shown:>8} {verdict}")

    def say(self, name: str, value: Any, text: str) -> None:
        self.figures[name] = value
        print(f"  {name}: {text}", flush=True)


def device_of(name: str) -> torch.device:
    import torch

    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    return device


def are_right(report: Report, checks: dict[str, Callable[[], str]], whatever: bool) -> bool:
    """Run the checks. Returns whether to measure, because the speed of code with wrong results does
    not matter. With `whatever`, failed checks do not count."""
    for name, check in checks.items():
        result = report.part(name, check)
        if result is not None:
            report.say(name, result, result)
        elif not whatever:
            return False
    return True


def ceilings_of(report: Report, device: torch.device, *, tiny: bool) -> Ceilings | None:
    from benchmarks.gpu import timing

    found: Ceilings | None = report.part(
        "ceilings", lambda: timing.measure_ceilings(device, tiny=tiny)
    )
    if found is not None:
        copied = found.copied_per_second
        report.say("copy", copied, f"{copied / 1e12:.3f} TB/s")
        for card, rate in timing.CARDS.items():
            here = " (this card, which floors are computed for)" if card == found.card else ""
            print(f"  memory of an {card}: {rate / 1e12:.2f} TB/s{here}")
        report.say("bf16 product", found.flops, f"{found.flops / 1e12:.1f} TFLOP/s")
    return found


def measure_fewer_bits(
    report: Report, device: torch.device, tiny: bool, *, whatever_is_wrong: bool
) -> None:
    import torch

    from benchmarks.gpu import checks, formats, measures, models

    size = models.TINY if tiny else replace(models.LARGE, batches=(1,))
    right = {
        "kernels": lambda: checks.check_kernels(device, tiny=tiny),
        "products": lambda: checks.check_products(device, tiny=tiny),
    }
    if not are_right(report, right, whatever_is_wrong):
        return
    ceilings = ceilings_of(report, device, tiny=tiny)
    checked = report.part("check at load", lambda: formats.check(size, device))
    if ceilings is None or checked is None:
        return
    for name in formats.FORMATS:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        work = partial(
            *(measures.measure_format, name, checked, size, ceilings, device),
            repeats=1 if tiny else 20,
        )
        say_all(report, report.part(name, work))


def measure(
    report: Report, device: torch.device, tiny: bool, *, peers: bool, whatever_is_wrong: bool
) -> None:
    import torch

    from benchmarks.gpu import checks, measures, models, throughput

    size = models.TINY if tiny else models.LARGE
    repeats = 1 if tiny else 20
    batch, *_, one_long = (f"decode, {what}" for what in size.decodes)
    report.want(batch, 0.8)
    report.want(f"decode, 1 of length {size.context}", 0.78)
    report.want(one_long, 0.8)
    report.want(f"prefill, {size.prompts} of length {size.prompt}", 0.55)
    report.want(CONTINUOUS, 2.5)
    for count, wanted in VLLM.items():
        report.want(f"over vLLM, {count} at once", wanted)

    right = {
        "kernels": lambda: checks.check_kernels(device, tiny=tiny),
        "experts": lambda: checks.check_experts(device, tiny=tiny),
        "whole models": lambda: checks.check_models(device, tiny=tiny),
    }
    if not are_right(report, right, whatever_is_wrong):
        return
    ceilings = ceilings_of(report, device, tiny=tiny)
    if ceilings is None:
        return

    alone = partial(measures.measure_attention, size, ceilings, device, repeats=repeats)
    say_all(report, report.part("attention alone", alone))
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
    ours_at = measure_serving(report, loaded, size, device)
    ours += ours_at.values()
    rates = []
    for name, settings in throughput.peer_settings(device).items() if peers else ():
        title = f"continuous batching, {name}"
        rate = report.part(title, lambda s=settings: throughput.peer_rate(loaded, size, device, s))
        if rate is not None:
            rates.append(rate)
            report.say(title, rate, f"{rate:.0f} tokens/s")
    if ours and rates:
        report.reach(CONTINUOUS, max(ours) / max(rates))
    elif not peers:
        report.reach(CONTINUOUS, None, "--without-peers")
    why_no_vllm = "--without-peers" if not peers else ""
    if find_spec("vllm") is None:
        why_no_vllm = "vllm is not installed"
    theirs: dict[int, float] = {}
    if not why_no_vllm and ours_at:
        loaded.model.to("meta")  # it needs the whole device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        counts = [*VLLM]
        theirs = report.part("vLLM", lambda: throughput.vllm_rates(loaded, size, counts)) or {}
    for count in VLLM:
        name = f"over vLLM, {count} at once"
        if count in theirs and count in ours_at:
            report.say(f"vLLM, {count} at once", theirs[count], f"{theirs[count]:.0f} tokens/s")
            report.reach(name, ours_at[count] / theirs[count])
        elif why_no_vllm:
            report.reach(name, None, why_no_vllm)


def measure_serving(
    report: Report, loaded: LoadedModel, size: Size, device: torch.device
) -> dict[int, float]:
    """Measure the engine under load. Returns tokens per second by the number of requests at
    once."""
    from benchmarks.gpu import serving

    served = report.part("serving", lambda: serving.Serving(loaded, size, device))
    found: dict[int, float] = {}
    if served is None:
        return found
    for count in sorted({size.batch, size.requests, *size.batches}):
        name = f"serving, {count} at once"
        rate = report.part(name, partial(served.rate, count))
        if rate is not None:
            found[count] = rate
            report.say(name, rate, f"{rate:.0f} tokens/s")
    for kind, params in serving.PARAMS.items():
        name = f"serving, {size.batch} at once, {kind}"
        rate = report.part(name, partial(served.rate, size.batch, params))
        if rate is not None:
            report.say(name, rate, f"{rate:.0f} tokens/s")
    guest = report.part("long guest", served.long_guest)
    if guest is not None:
        alone, longest, first = guest
        report.say(
            f"a prompt of {size.guest} beside {size.batch} decodes",
            {"alone": alone, "longest step": longest, "first token": first},
            f"steps of {alone * 1e3:.1f} ms alone, of {longest * 1e3:.1f} ms at most beside it;"
            f" its first token after {first:.3f} s",
        )
    if size.requests in found:
        latencies = report.part("Poisson", partial(served.poisson, found[size.requests]))
        if latencies is not None:
            name = f"Poisson arrivals at {serving.LOAD:.0%} of that rate"
            report.say(name, latencies.text(), latencies.text())
    return found


def measure_steps(report: Report, bench: Bench, ceilings: Ceilings, repeats: int) -> None:
    from benchmarks.gpu import measures

    for name, measured in (
        ("decode", measures.measure_decode),
        ("prefill", measures.measure_prefill),
        ("decode, compiled", partial(measures.measure_decode, compiled=True)),
        ("prefill, compiled", partial(measures.measure_prefill, compiled=True)),
    ):
        figures = report.part(name, partial(measured, bench, ceilings, repeats=repeats))
        say_all(report, figures)
    if bench.device.type == "cuda":
        for what, contexts in [*bench.size.decodes.items()][:2]:
            work = partial(measures.measure_kernels, bench, contexts)
            for kernel in report.part(f"kernels of a decode step, {what}", work) or []:
                text = f"{kernel.launches:5.1f} times {kernel.each:7.1f} us"
                report.say(f"{what}: {kernel.name}", kernel.in_step, text)


def say_all(report: Report, figures: list[Figure] | None) -> None:
    """Report figures. If a figure's name begins with the name of a table row, the figure belongs to
    the row."""
    for figure in figures or []:
        share = figure.share_of_floor
        text = f"{figure.took:.3f} ms"
        if share is not None:
            text += f", at least {figure.floor:.3f}: {share:.0%} of what is possible"
        for name in report.table:
            if figure.name.startswith(name) and share is not None:
                report.reach(name, share)
        report.say(figure.name, {"ms": figure.took, "share": share}, text)


if __name__ == "__main__":
    sys.exit(main())
