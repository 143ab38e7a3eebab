"""Compares decodes, prefills and single kernels with the device's limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.gpu import formats
from benchmarks.gpu.models import Bench, Size, weight_bytes
from benchmarks.gpu.timing import Ceilings, KernelTime, kernels_of, seconds
from promptq.worker.engine.load_check.checked_model import CheckedModel


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured time, in milliseconds, and its lower bound on this device."""

    name: str
    took: float
    floor: float | None = None

    @property
    def share_of_floor(self) -> float | None:
        """The lower bound divided by the time: 1 is as fast as the device allows."""
        return None if self.floor is None else self.floor / self.took


@torch.inference_mode()
def measure_decode(
    bench: Bench,
    ceilings: Ceilings,
    *,
    repeats: int,
    compiled: bool = False,
) -> list[Figure]:
    """Measures decode steps, launched directly and as padded graphs, and compares them with the
    time of reading memory. With `compiled`, measures only the first kind of step."""
    launched = "without graph" if compiled else "eager"
    figures = []
    with bench.layers(compiled=compiled) as model:
        for what, contexts in list(bench.size.decodes.items())[: 1 if compiled else None]:
            floor = decode_floor(bench, ceilings, contexts)
            step = bench.step(contexts, 1)
            rows = torch.arange(len(contexts), device=bench.device)
            plain = partial(model.logits, step, rows)
            graph = partial(bench.graphed(model, len(contexts)).logits, step, rows)
            for way, work in ((launched, plain), ("graph", graph)):
                took = seconds(work, bench.device, repeats=repeats)
                name = f"decode, {what}{', compiled' * compiled}, {way}"
                figures.append(Figure(name, took * 1e3, floor * 1e3))
    return figures


@torch.inference_mode()
def measure_kernels(bench: Bench, contexts: list[int]) -> list[KernelTime]:
    """Measures the kernels of a decode step that is replayed as a graph."""
    step = bench.step(contexts, 1)
    rows = torch.arange(len(contexts), device=bench.device)
    with bench.layers(compiled=False) as model:
        graphed = bench.graphed(model, len(contexts))
        return kernels_of(lambda: graphed.logits(step, rows))


def decode_floor(bench: Bench, ceilings: Ceilings, contexts: list[int]) -> float:
    """Returns the seconds in which weights and live K and V can be read."""
    kv_bytes = sum(contexts) * bench.cache.bytes_per_token
    return (weight_bytes(bench.loaded.model) + kv_bytes) / ceilings.bytes_per_second


@torch.inference_mode()
def measure_prefill(
    bench: Bench, ceilings: Ceilings, *, repeats: int, compiled: bool = False
) -> list[Figure]:
    """Measures a step of whole prompts, and compares it with the time of its products at the matrix
    rate."""
    size = bench.size
    step = bench.step([size.prompt] * size.prompts, size.prompt)
    rows = step.sampled
    head = size.hidden * size.vocab
    pairs = size.prompts * size.prompt * (size.prompt + 1) // 2
    in_layers = size.layers * sum(inputs * outputs for inputs, outputs in size.products)
    flops = 2 * in_layers * size.prompts * size.prompt + 2 * head * size.prompts
    flops += 4 * pairs * size.heads * size.head_size * size.layers
    with bench.layers(compiled=compiled) as model:
        took = seconds(lambda: model.logits(step, rows), bench.device, repeats=repeats)
    name = f"prefill, {size.prompts} of length {size.prompt}{', compiled' * compiled}"
    return [Figure(name, took * 1e3, flops / ceilings.flops * 1e3)]


def measure_format(
    name: str,
    checked: CheckedModel,
    size: Size,
    ceilings: Ceilings,
    device: torch.device,
    *,
    repeats: int,
) -> list[Figure]:
    """Measures decodes and a prefill of the model in another format."""
    bench = formats.build(name, checked, size, device)
    figures = measure_decode(bench, ceilings, repeats=repeats)
    [prefill] = measure_prefill(bench, ceilings, repeats=repeats)
    if formats.FORMATS[name].has_fp8_weights:  # the matrix rate is that of bf16
        prefill = replace(prefill, floor=None)
    figures.append(prefill)
    return [replace(figure, name=f"{name}: {figure.name}") for figure in figures]
