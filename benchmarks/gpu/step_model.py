"""Counts the kernels of a decode step, and estimates their time.

`python -m benchmarks gpu-steps` needs no GPU. The times are estimates, not measurements: a kernel
takes the time of its launch and of moving its bytes. The launches are counted by running the
decoder on tensors without values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from benchmarks.gpu.formats import FORMATS, WIDE, Format, quantize
from benchmarks.gpu.models import BLOCK_SIZE, LARGE, Size, build
from benchmarks.gpu.timing import CARDS
from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.attention.types import FULL, LayerSpec, StepLayout
from promptq.worker.engine.core.block_manager import num_blocks_for
from promptq.worker.engine.decoders.base import Placement
from promptq.worker.engine.decoders.kernels.fused import FusedDecoder
from promptq.worker.engine.model.packed_model import PackedModel

LAUNCH = 1.5e-6
"""Seconds from the end of a kernel in a CUDA graph to the start of the next; an assumption."""
BATCHES, CONTEXT = (1, 64, 256), 1000
NUM_BYTES = 2
"""Bytes of a number in bf16, and of a scale for 4 bits. A scale for 8 bits has twice as many."""
META = torch.device("meta")
PRODUCTS = ("mm", "_scaled_mm", "_product_kernel")
"""The names of launches that multiply."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch, by the name that a Recorder gives to it, and the bytes that the launch moves."""

    name: str
    bytes: int


def _matmul(rows: int, inputs: int, outputs: int, wanted: Format = WIDE) -> list[Kernel]:
    """Returns the launches of a product with a weight of this format."""
    weight = _bytes_of(inputs, outputs, wanted)
    if wanted.has_fp8_weights:  # rows are rounded first, each with a scale
        in_fp8 = rows * (inputs + 4)
        rounded = Kernel("_round_kernel", NUM_BYTES * rows * inputs + in_fp8)
        return [rounded, Kernel("_scaled_mm", weight + in_fp8 + NUM_BYTES * rows * outputs)]
    name = "mm" if wanted.bits is None else "_product_kernel"
    return [Kernel(name, weight + NUM_BYTES * rows * (inputs + outputs))]


def _bytes_of(inputs: int, outputs: int, wanted: Format) -> int:
    """Returns the bytes of a weight with all its scales."""
    if wanted.has_fp8_weights:
        return outputs * (inputs + 4)
    if wanted.bits is None:
        return NUM_BYTES * inputs * outputs
    scales = outputs * (inputs // (wanted.group or inputs))
    return inputs * outputs * wanted.bits // 8 + scales * (2 if wanted.bits == 4 else 4)


def _add_norm(rows: int, hidden: int) -> Kernel:
    """The launch that reads the hidden state and the update, and writes the sum and its norm."""
    return Kernel("_add_norm_kernel", NUM_BYTES * (4 * rows + 1) * hidden)


def layer_kernels(size: Size, rows: int, context: int, wanted: Format = WIDE) -> list[Kernel]:
    """Returns a layer's launches in a decode step of `rows` sequences, each with `context`
    tokens."""
    query, kv = size.heads * size.head_size, size.kv_heads * size.head_size
    to_heads, to_output, to_inner, from_inner = size.products
    of_cache = 1 if wanted.has_fp8_cache else NUM_BYTES
    in_heads = NUM_BYTES * (rows * (2 * query + 2 * kv) + (rows + 2) * size.head_size)
    in_heads += of_cache * 2 * rows * kv
    attended = of_cache * 2 * rows * context * kv + NUM_BYTES * 2 * rows * query
    return [
        _add_norm(rows, size.hidden),
        *_matmul(rows, *to_heads, wanted),
        Kernel("_place_heads_kernel", in_heads),
        Kernel("_decode_kernel", attended),
        *_matmul(rows, *to_output, wanted),
        _add_norm(rows, size.hidden),
        *_matmul(rows, *to_inner, wanted),
        Kernel("_activation_kernel", NUM_BYTES * 3 * rows * size.intermediate),
        *_matmul(rows, *from_inner, wanted),
    ]


def outer_kernels(size: Size, rows: int, wanted: Format = WIDE) -> list[Kernel]:
    """Returns the launches before the first layer and after the last, without sampling."""
    copied = NUM_BYTES * 2 * rows * size.hidden
    return [
        Kernel("embedding", copied),
        Kernel("index_select", copied),
        Kernel("index_select", copied),
        _add_norm(rows, size.hidden),
        *_matmul(rows, size.hidden, size.vocab, wanted.of_head),
    ]


def step_kernels(size: Size, rows: int, context: int, wanted: Format = WIDE) -> list[Kernel]:
    """Returns all launches of a decode step."""
    in_layers = layer_kernels(size, rows, context, wanted) * size.layers
    return in_layers + outer_kernels(size, rows, wanted)


def seconds_of(kernels: Sequence[Kernel], bytes_per_second: float) -> float:
    return sum(LAUNCH + kernel.bytes / bytes_per_second for kernel in kernels)


def floor_bytes(size: Size, rows: int, context: int, wanted: Format = WIDE) -> int:
    """Returns the bytes that any program has to read: the weights of a step, and live K and V."""
    kv = size.kv_heads * size.head_size
    weights = size.layers * sum(_bytes_of(*shape, wanted) for shape in size.products)
    weights += _bytes_of(size.hidden, size.vocab, wanted.of_head)
    of_cache = 1 if wanted.has_fp8_cache else NUM_BYTES
    return weights + of_cache * size.layers * 2 * rows * context * kv


class Recorder(TorchDispatchMode):
    """Counts launches: Triton's kernels, and torch's operations except views and allocations.
    Tensors of the device `meta` compute nothing, and reading a value raises an error."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.product_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        name = "mm" if name == "addmm" else name
        if not func.is_view and name not in ("empty", "empty_like", "new_empty", "_unsafe_view"):
            self.counts[name] += 1
        if name in PRODUCTS:
            self.add_bytes([*args, *(kwargs or {}).values(), result])
        return result

    def add_bytes(self, arguments: Sequence[Any]) -> None:
        """Add the bytes of a product's tensors, each once."""
        tensors = {id(each): each for each in arguments if isinstance(each, torch.Tensor)}
        self.product_bytes += sum(it.nbytes for it in tensors.values())


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Record all launches inside the block. Triton's kernels do not run."""
    recorder = Recorder()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        recorder.counts[self.__name__] += 1
        if self.__name__ in PRODUCTS:
            recorder.add_bytes(args[:6])  # what follows are sums, which stay in the card's cache

    with (
        torch.no_grad(),
        patch.object(JITFunction, "run", launch),
        patch.object(InterpretedFunction, "run", launch),
        recorder,
    ):
        yield recorder


def record_step(
    size: Size, rows: int, context: int, *, fused: bool, wanted: Format = WIDE
) -> Recorder:
    """Returns the launches of a decode step, with the fused decoder or the library's modules."""
    decoder, step = _on_meta(size, rows, context, fused, wanted)
    with recorded():
        decoder.logits(step, step.positions[0])  # makes the step's plans, which graphs do not do
    with recorded() as recorder:
        decoder.logits(step, step.positions[0])
    return recorder


def launches_of_a_layer(size: Size, rows: int, context: int, *, fused: bool) -> Counter[str]:
    two, three = (
        record_step(replace(size, layers=layers), rows, context, fused=fused).counts
        for layers in (2, 3)
    )
    return three - two


def _on_meta(
    size: Size, rows: int, context: int, fused: bool, wanted: Format
) -> tuple[FusedDecoder | PackedModel, PackedStep]:
    model: Any = build(size, META).model
    quantize(model, wanted, META)
    dtype = torch.bfloat16
    spec = LayerSpec(size.heads, size.kv_heads, size.head_size, size.head_size, dtype, dtype)
    spec = spec.in_fp8() if wanted.has_fp8_cache else spec
    specs = [spec] * size.layers
    cache = KVCache(specs, num_blocks=2, block_size=BLOCK_SIZE, device=META)
    patterns, backend = [FULL] * size.layers, TritonPaged()
    zeros = torch.zeros(rows, dtype=torch.int64, device=META)
    layout = StepLayout(
        num_decodes=rows,
        query_starts=list(range(rows + 1)),
        context_lens=[context] * rows,
        block_tables=zeros.unsqueeze(1).expand(rows, num_blocks_for(context, BLOCK_SIZE)),
        write_blocks=zeros,
        write_offsets=zeros,
        block_size=BLOCK_SIZE,
    )
    row = zeros.unsqueeze(0)
    step = PackedStep([], row, row, layout, zeros, zeros[:0].double(), zeros[:0])
    if fused:
        placement = Placement(cache.layers, patterns, backend, context)
        return FusedDecoder(model, placement), step
    modules = [layer.self_attn for layer in model.model.layers]
    return PackedModel(model, modules, cache.layers, patterns, backend), step


def main() -> None:
    size = LARGE
    print(f"launches of a layer, {BATCHES[1]} rows, contexts of {CONTEXT} tokens")
    for way, fused in (("fused", True), ("the library's modules", False)):
        counts = launches_of_a_layer(size, BATCHES[1], CONTEXT, fused=fused)
        print(f"  {way}: {counts.total()}: {dict(sorted(counts.items()))}")
    print(f"a step, contexts of {CONTEXT} tokens; floor, bytes alone, with launches (ms)")
    for (card, rate), (form, wanted), rows in product(
        CARDS.items(), {"bf16": WIDE, **FORMATS}.items(), BATCHES
    ):
        kernels = step_kernels(size, rows, CONTEXT, wanted)
        moved = sum(kernel.bytes for kernel in kernels)
        floor = floor_bytes(size, rows, CONTEXT, wanted) / rate
        took = seconds_of(kernels, rate)
        print(
            f"  {card.split()[0]}, {form}, {rows} rows: {len(kernels)} launches, "
            f"{moved / 1e9:.2f} GB; "
            f"{floor * 1e3:.2f}, {moved / rate * 1e3:.2f}, {took * 1e3:.2f} "
            f"({floor / took:.0%} of the floor's rate)"
        )


if __name__ == "__main__":
    main()
