"""Compares decodes, prefills and single kernels with the device's limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from benchmarks.gpu import formats
from benchmarks.gpu.cases import Case, Shape
from benchmarks.gpu.models import BLOCK_SIZE, SEED, Bench, Size, weight_bytes
from benchmarks.gpu.timing import Ceilings, KernelTime, kernels_of, seconds
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.attention.types import Scoring
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
    """Measure decode steps, launched directly and as padded graphs, and compare them with the time
    of reading memory. With `compiled`, measure compiled layers, and only the first of the decode
    steps."""
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
    """Measure the kernels of a decode step that is replayed as a graph."""
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
    """Measure a step of whole prompts, and compare it with the time that its matrix products take
    at the device's highest rate."""
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
    """Measure decodes and a prefill of the model in another format."""
    bench = formats.build(name, checked, size, device)
    figures = measure_decode(bench, ceilings, repeats=repeats)
    [prefill] = measure_prefill(bench, ceilings, repeats=repeats)
    if formats.FORMATS[name].has_fp8_weights:  # the matrix rate is that of bf16
        prefill = replace(prefill, floor=None)
    figures.append(prefill)
    return [replace(figure, name=f"{name}: {figure.name}") for figure in figures]


@torch.inference_mode()
def measure_attention(
    size: Size, ceilings: Ceilings, device: torch.device, *, repeats: int
) -> list[Figure]:
    """Measure one layer's attention alone, and torch's attention for packed sequences."""
    shape = Shape(size.heads, size.kv_heads, size.head_size, size.head_size, BLOCK_SIZE)
    figures = []
    for kind, step in (
        ("decode", [(size.context, 1)] * size.batch),
        ("prefill", [(size.prompt, size.prompt)] * size.prompts),
    ):
        # Some layers, so that what is read does not lie in the cache of the last call.
        layers = [
            Case(step, shape, dtype=torch.bfloat16, device=device, seed=SEED + index)
            for index in range(1 if device.type == "cpu" else 4)
        ]
        scoring = Scoring(size.head_size**-0.5)
        num_tokens = sum(context for context, _ in step)
        if kind == "decode":
            kv_bytes = num_tokens * size.kv_heads * size.head_size * 2 * 2
            floor = kv_bytes / ceilings.bytes_per_second
        else:
            pairs = size.prompts * size.prompt * (size.prompt + 1) // 2
            floor = 4 * pairs * size.heads * size.head_size / ceilings.flops
        for name, attend in (("Triton", _triton), ("torch's varlen_attn", _varlen)):
            try:
                expected = _triton(layers[0], scoring)
                torch.testing.assert_close(
                    attend(layers[0], scoring), expected, atol=0.03, rtol=0.1
                )
                took = seconds(_all(attend, layers, scoring), device, repeats=repeats)
            except Exception as error:  # what torch has differs between versions and cards
                reason = str(error).strip().split("\n")[0]
                print(f"  attention, {kind}, {name}: not here: {reason[:150]}")
                continue
            figures.append(
                Figure(f"attention, {kind}, {name}", took / len(layers) * 1e3, floor * 1e3)
            )
    return figures


def _all(
    attend: Callable[[Case, Scoring], torch.Tensor], layers: list[Case], scoring: Scoring
) -> Callable[[], Any]:
    return lambda: [attend(layer, scoring) for layer in layers]


def _triton(case: Case, scoring: Scoring) -> torch.Tensor:
    return TritonPaged().attend(
        case.query, case.new_keys, case.new_values, case.cache, case.layout, scoring
    )


def _varlen(case: Case, scoring: Scoring) -> torch.Tensor:
    """Computes torch's attention. It does not write the cache, unlike Triton's."""
    from torch.nn.attention.varlen import varlen_attn

    layout, device = case.layout, case.query.device
    if layout.num_decodes and (reason := _why_no_block_table(device)):
        raise RuntimeError(reason)
    rows = torch.tensor(layout.query_starts, dtype=torch.int32, device=device)
    most = max(layout.context_lens)
    causal: dict[str, Any] = {"scale": scoring.scale, "window_size": (-1, 0)}
    if "enable_gqa" in signature(varlen_attn).parameters:  # others share K and V without it
        causal["enable_gqa"] = True
    if layout.num_decodes == 0:
        return varlen_attn(
            case.query, case.new_keys, case.new_values, rows, rows, most, most, **causal
        )
    return varlen_attn(
        case.query,
        case.cache.key.transpose(1, 2),
        case.cache.value.transpose(1, 2),
        rows,
        None,
        1,
        most,
        seqused_k=torch.tensor(layout.context_lens, dtype=torch.int32, device=device),
        block_table=layout.block_tables.to(torch.int32),
        **causal,
    )


def _why_no_block_table(device: torch.device) -> str:
    """Returns why torch's varlen_attn reads no block table here (as of torch 2.13); empty if it
    does.

    FlashAttention 3 is activated if it is installed.
    """
    if device.type != "cuda":
        return "it needs CUDA"
    try:
        from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
    except ImportError:
        return f"torch {torch.__version__} has no other FlashAttention than 2"
    if find_spec("flash_attn_interface") is not None:
        activate_flash_attention_impl("FA3")
    active, (major, _) = current_flash_attention_impl(), torch.cuda.get_device_capability(device)
    if active == "FA3" or (active == "FA4" and major == 10):
        return ""
    return (
        "the FlashAttention 2 in torch reads no block table; FlashAttention 3 does if its package"
        " flash_attn_interface is installed, and FlashAttention 4 on compute capability 10 if it is"
        f" activated (here: {active or 'neither'}, on capability {major})"
    )
