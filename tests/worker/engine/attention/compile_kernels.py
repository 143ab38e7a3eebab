"""Compile the Triton kernels for a card that need not be there: `... compile_kernels.py 90 SEED`.

The launchers run as ever, but each launch ends with the machine code. Prints a line of JSON about
each launch (see `described`). The seed chooses one variant of each kernel, and two of attention.
With `--whole` after the seed, all variants are compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.cases import Case, Shape
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.attention.types import FULL, LayerCache, Pattern, Scoring, StepLayout
from promptq.worker.engine.decoders.expert_parts import Limits, Routing
from promptq.worker.engine.decoders.kernels.activation import Activation
from promptq.worker.engine.decoders.kernels.convolution import convolve
from promptq.worker.engine.decoders.kernels.experts import add_experts, choose_experts
from promptq.worker.engine.decoders.kernels.fp8_product import rounded
from promptq.worker.engine.decoders.kernels.gated_norm import gated_norm
from promptq.worker.engine.decoders.kernels.grouped_product import GroupedProduct, Groups
from promptq.worker.engine.decoders.kernels.heads import HeadNorms, place_heads
from promptq.worker.engine.decoders.kernels.latent import FusedLatentAttention
from promptq.worker.engine.decoders.kernels.norm import add_norm, norm_columns
from promptq.worker.engine.decoders.kernels.quantized_product import FEW_ROWS, QuantizedProduct
from promptq.worker.engine.decoders.kernels.scan import Scan
from promptq.worker.engine.decoders.kernels.sequences import StepSequences
from promptq.worker.engine.decoders.latent_parts import LatentAttention
from promptq.worker.engine.decoders.mlp_parts import ACTIVATIONS
from promptq.worker.engine.decoders.norm_parts import RMS_NORM, Norm, NormFormula
from promptq.worker.engine.decoders.rotation_parts import RotationTables
from promptq.worker.engine.quantization.weight import QuantizedWeight
from promptq.worker.engine.recurrent.parts import GatedNorm, RecurrenceParts
from promptq.worker.engine.sampling.triton_choice import choose_tokens

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one program may use, by compute capability (CUDA's programming guide)."""
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class NoDriver:
    """Tells the compiler and the launchers of a card of the given architecture."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)
        properties = {
            "max_shared_mem": SHARED_MEMORY[architecture],
            "multiprocessor_count": 132,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def described(name: str, compiled: Any) -> dict[str, Any]:
    """`kernel`, `shared` bytes, `registers` a thread, `stack` bytes of spilled registers, `warps`,
    `loop`: the instructions of the product's longest loop, `waits`: how many reads may be under way
    at each wait for reads, and `buffers`: how many tiles each buffer in shared memory holds."""
    code = compiled.asm["cubin"]
    registers, stack = re.findall(r"\b(?:REG|STACK):(\d+)", _dump(code, "--dump-resource-usage"))
    text = compiled.asm["ttgir"]
    return {
        "kernel": name,
        "shared": compiled.metadata.shared,
        "registers": int(registers),
        "stack": int(stack),
        "warps": compiled.metadata.num_warps,
        # To print the instructions takes as long as to compile a kernel.
        "loop": _longest_loop(_dump(code, "--dump-sass")) if name == "_product_kernel" else None,
        "waits": [int(num) for num in re.findall(r"async_wait.*\{num = (\d+)", text)],
        "buffers": [int(num) for num in re.findall(r"local_alloc : .*memdesc<(\d+)x\d+x\d", text)],
    }


@cache
def _dump(cubin: bytes, option: str) -> str:
    """Returns this part of the code's description. Launches with other arguments often share it."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _longest_loop(code: str) -> int:
    """How many instructions are between a branch back and where it leads."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]+);", code)
    places = [int(place, 16) for place, _ in found]
    loops = [0]
    for place, instruction in found:
        if branch := re.search(r"\bBRA\b.* 0x([0-9a-f]+)", instruction):
            loops.append(sum(int(branch[1], 16) <= it <= int(place, 16) for it in places))
    return max(loops)


def main() -> None:
    architecture = int(sys.argv[1])
    driver.set_active(NoDriver(architecture))
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = launch(self, *args, warmup=True, **kwargs)
        print(json.dumps(described(self.__name__, compiled)), flush=True)
        return compiled

    JITFunction.run = compile_only
    draw, is_whole = Random(int(sys.argv[2])), "--whole" in sys.argv

    def run(variants: Sequence[Callable[[], Any]], count: int = 1) -> None:
        for variant in variants if is_whole else draw.sample(variants, count):
            variant()

    run(attention_variants(architecture), 2)
    choose_tokens(torch.zeros(4, 150_000, dtype=torch.bfloat16), torch.zeros(5, 4).double())
    for variants in (product_variants(), *fused_variants()):
        run(variants)
    if architecture >= 90:  # also from 89 on, which is not compiled for here
        for width in (HIDDEN, 4 * HIDDEN):
            rounded(empty(2, width))


HIDDEN, NUM_HEADS, NUM_KV_HEADS, SIZE = 4096, 32, 8, 128
QKV_SIZE = (NUM_HEADS + 2 * NUM_KV_HEADS) * SIZE
NUM_EXPERTS, INNER, TOP_K = 16, 768, 8
GEMMAS_NORM = NormFormula(is_centered=False, adds_one=True, rounds_twice=False)
CENTERED_NORM = NormFormula(is_centered=True, adds_one=True, rounds_twice=False)
FORMATS = [(8, None, False), (8, 16, True), (4, 32, False), (4, 32, True), (4, 128, True)]
"""Bits, group, and whether there are offsets."""


def empty(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def norm(size: int, formula: NormFormula = RMS_NORM) -> Norm:
    return Norm(empty(size), empty(size) if formula.is_centered else None, 1e-6, formula)


def quantized(
    outputs: int, inputs: int, bits: int, group: int | None, has_offsets: bool
) -> QuantizedWeight:
    group = group or inputs
    numbers = torch.zeros(outputs, inputs, dtype=torch.uint8)
    factors = torch.zeros(outputs, inputs // group)
    weight = QuantizedWeight.pack(numbers, factors, bits, group, factors if has_offsets else None)
    if bits == 4:  # as on a card
        offsets = None if weight.offsets is None else weight.offsets.half()
        weight = replace(weight, scales=weight.scales.half(), offsets=offsets)
    return weight


def attention_variants(architecture: int) -> list[Callable[[], None]]:
    """Each of them launches all kernels of attention. From 90 on, K and V may be in fp8."""
    step = [(1000, 1)] * 4 + [(300, 200)]

    def attend(
        shape: Shape,
        pattern: Pattern = FULL,
        softcap: float | None = None,
        kept: torch.dtype | None = None,
    ) -> None:
        options = {"dtype": torch.bfloat16, "kept": kept, "device": torch.device("cpu"), "seed": 1}
        case = Case(step, shape, **options)
        sinks = None if softcap is None else case.sinks
        case.attend(TritonPaged(), Scoring(0.1, pattern, softcap, sinks))

    shapes = Shape(32, 8, 128, 128), Shape(12, 4, 192, 128)
    latent = Shape(64, 1, 64, 512, is_latent=True)  # of DeepSeek-V3 on two cards
    return [
        *(partial(attend, shape) for shape in (*shapes, latent)),
        *(partial(attend, shape, Pattern("sliding", 128), 30.0) for shape in shapes),
        *([partial(attend, shapes[0], kept=torch.float8_e4m3fn)] if architecture >= 90 else []),
    ]


def product_variants() -> list[Callable[[], None]]:
    """Of the product with weights of few bits: each format, for few rows and many."""

    def multiply(wanted: tuple[int, int | None, bool]) -> None:
        multiplied = QuantizedProduct(quantized(QKV_SIZE, HIDDEN, *wanted), empty(QKV_SIZE))
        for num_rows in (2, 64, FEW_ROWS + 1):
            multiplied(empty(num_rows, HIDDEN))

    return [partial(multiply, wanted) for wanted in FORMATS]


def fused_variants() -> list[list[Callable[[], Any]]]:
    """Of each kernel of the fused decoder."""
    return [
        *recurrent_variants(),
        [
            partial(place, 64, False, RMS_NORM, False),
            partial(place, 32, True, GEMMAS_NORM, False),
            partial(place, 64, False, CENTERED_NORM, True),
            partial(place, 0, False, None, False),
            partial(place, 32, False, GEMMAS_NORM, False, is_gated=True),
        ],
        [partial(place_latent, is_interleaved) for is_interleaved in (True, False)],
        [
            partial(Activation(name, is_gated, is_interleaved, limits), empty(2, 6 * HIDDEN))
            for name, is_gated, is_interleaved, limits in (
                *((name, True, False, Limits()) for name in ACTIVATIONS),
                ("relu2", False, False, Limits()),
                ("silu", True, True, Limits(1.7, 7.0)),
            )
        ],
        [partial(add, HIDDEN, RMS_NORM, None)],
        [
            partial(add, 4 * HIDDEN, RMS_NORM, None),  # of the widest models
            partial(add, HIDDEN, GEMMAS_NORM, GEMMAS_NORM),
            partial(add, HIDDEN, None, CENTERED_NORM),
            partial(norm_columns, empty(2, QKV_SIZE)[:, :HIDDEN], norm(HIDDEN)),
        ],
        [
            partial(choose, Routing(128, 8, normalizes=True)),
            partial(
                choose,
                Routing(256, 8, "sigmoid", torch.zeros(256), num_groups=8, top_groups=4),
            ),
            partial(choose, Routing(16, 2, "sparsemixer", jitter=0.01)),
        ],
        [partial(group, TOP_K)],
        [
            partial(multiply_experts, 2, None),
            *(
                partial(multiply_experts, num_rows, wanted)
                for num_rows in (2, 100, 400)
                for wanted in (None, "transposed", *FORMATS)
                if (num_rows, wanted) != (2, None)
            ),
        ],
        [
            partial(add_experts, empty(2 * TOP_K, HIDDEN), torch.zeros(2, TOP_K), None, None),
            partial(
                add_experts,
                empty(2 * TOP_K, HIDDEN),
                torch.zeros(2, TOP_K),
                empty(2, HIDDEN),
                torch.zeros(2, 129),
            ),
        ],
    ]


def recurrent_variants() -> list[list[Callable[[], Any]]]:
    """Of each kernel for recurrent layers."""
    qwen, granite = RecurrentSize(16, 32, 128, 128), RecurrentSize(1, 48, 128, 64)
    sizes = (qwen, True), (granite, False), (RecurrentSize(1, 32, 256, 64), False)  # Falcon-H1
    kimi = partial(scan, RecurrentSize(32, 32, 128, 128), True, has_key_decays=True)
    of_head, of_row = (GatedNorm(empty(size), 1e-6, size, False) for size in (SIZE, HIDDEN))
    return [
        [partial(convolve_rows, False, 4, False), partial(convolve_rows, True, 3, True)],
        *(
            [
                *(partial(scan, *size, num_rows) for size in sizes),
                partial(kimi, num_rows),
            ]
            for num_rows in (1, 5)
        ),
        # A step in fp32 has no kernel for chunks.
        [
            partial(scan, *size, num_rows, dtype=torch.float32)
            for size in sizes
            for num_rows in (1, 5)
        ],
        [
            partial(gated_norm, torch.zeros(2, HIDDEN), empty(2, 2 * HIDDEN)[:, HIDDEN:], norm)
            for norm in (of_head, of_row, replace(of_row, gates_first=True), None)
        ],
    ]


class RecurrentSize(NamedTuple):
    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int


def sequences(num_rows: int) -> StepSequences:
    """A sequence that decodes, or has a chunk."""
    table, owner = torch.zeros(5, 1, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int64)
    return StepSequences(table, owner, int(num_rows == 1), int(num_rows > 1))


def convolution(channels: int, size: int, has_bias: bool) -> torch.nn.Conv1d:
    return torch.nn.Conv1d(
        *(channels, channels, size), groups=channels, bias=has_bias, dtype=torch.bfloat16
    ).requires_grad_(False)


def convolve_rows(is_gated: bool, size: int, has_bias: bool) -> None:
    convolve(
        empty(5, 3 * HIDDEN),
        convolution(HIDDEN, size, has_bias),
        sequences(5),
        empty(3, size - 1, HIDDEN),
        is_gated=is_gated,
    )


def scan(
    size: RecurrentSize,
    is_delta: bool,
    num_rows: int,
    has_key_decays: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    of_keys = size.num_key_heads * size.key_size
    num_channels = 2 * of_keys + size.num_value_heads * size.value_size
    per_head = torch.zeros(size.num_value_heads)
    num_times = size.num_value_heads * (size.key_size if has_key_decays else 1)
    parts = RecurrenceParts(
        inputs=(),
        convolution=convolution(num_channels, 4, False).to(dtype),
        activation=None,
        is_delta=is_delta,
        **size._asdict(),
        query_first=0,
        key_first=of_keys,
        value_first=2 * of_keys,
        query_scale=0.1,
        decay=per_head,
        time_bias=torch.zeros(num_times),
        skip=None if is_delta else per_head,
        norm=None,
        output=torch.nn.Linear(1, 1),
    )
    states = torch.zeros(3, size.num_value_heads, size.key_size, size.value_size)
    convolved = empty(num_rows, num_channels).to(dtype)
    rates = convolved[:, -size.num_value_heads - num_times :]
    Scan(parts)(convolved, rates, states, sequences(num_rows))


def place(
    pairs: int,
    is_interleaved: bool,
    formula: NormFormula | None,
    follow: bool,
    is_gated: bool = False,
) -> None:
    places = torch.zeros(2, dtype=torch.int64)
    layout = StepLayout(0, [], [], places.unsqueeze(1), places, places, 16)
    cache = LayerCache(*(empty(4, NUM_KV_HEADS, 16, SIZE) for _ in range(2)))
    tables = RotationTables(empty(9, pairs), empty(9, pairs), is_interleaved) if pairs else None
    norms = None
    if formula is not None:
        norms = HeadNorms.of(norm(SIZE, formula), norm(SIZE, formula), follow_rotation=follow)
    of_gates = NUM_HEADS * SIZE if is_gated else 0
    qkv = empty(2, QKV_SIZE + of_gates)
    place_heads(qkv, places, tables, norms, cache, layout, is_gated=is_gated)


def place_latent(is_interleaved: bool) -> None:
    """With the sizes of DeepSeek-V3."""
    num_heads, key_size, size, rank = 128, 128, 64, 512
    inputs = torch.nn.Linear(HIDDEN, num_heads * (key_size + size)), torch.nn.Linear(HIDDEN, 576)
    parts = LatentAttention(
        *(inputs, None, None, norm(rank), torch.nn.Linear(rank, num_heads * 256), inputs[0]),
        *(num_heads, key_size, size, 0.1, None, is_interleaved),
    )
    places = torch.zeros(2, dtype=torch.int64)
    step: Any = SimpleNamespace(
        positions=places[None],
        layout=StepLayout(0, [], [], places.unsqueeze(1), places, places, 16),
    )
    cache = LayerCache(empty(4, 1, 16, size), empty(4, 1, 16, rank))
    tables = RotationTables(empty(9, size // 2), empty(9, size // 2), is_interleaved)
    layer = FusedLatentAttention(parts, tables, cache, Pattern("full"), TritonPaged())
    layer.place(empty(2, num_heads, key_size + size), empty(2, rank + size), step)


def add(width: int, before: NormFormula | None, after: NormFormula | None) -> None:
    add_norm(
        empty(2, width),
        empty(2, width),
        None if before is None else norm(width, before),
        None if after is None else norm(width, after),
        1.0 if after is None else 0.5,
    )


def choose(routing: Routing) -> None:
    choose_experts(routing, torch.zeros(2, routing.num_experts))


def group(top_k: int) -> Groups:
    return Groups.of(torch.zeros(2, top_k, dtype=torch.int32), NUM_EXPERTS)


def multiply_experts(num_rows: int, wanted: Any) -> None:
    """In both linear layers of experts."""
    groups = Groups(
        torch.zeros(num_rows * TOP_K, dtype=torch.int32),
        torch.zeros(NUM_EXPERTS + 1, dtype=torch.int32),
    )
    weight: Any = empty(NUM_EXPERTS, 2 * INNER, HIDDEN)
    if wanted == "transposed":
        weight = empty(NUM_EXPERTS, HIDDEN, 2 * INNER).transpose(1, 2)
    elif wanted is not None:
        weight = quantized(NUM_EXPERTS * 2 * INNER, HIDDEN, *wanted)
    GroupedProduct(weight, NUM_EXPERTS)(empty(num_rows, HIDDEN), groups)


if __name__ == "__main__":
    main()
