"""Compile the Triton kernels for a card that need not be there: `... compile_kernels.py 90 SEED`.

The launchers run as ever, but each launch ends with the machine code. Prints a line of JSON about
each launch (see `described`). The seed chooses which layer follows a plain one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.cases import Case, Shape
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.attention.types import LayerCache, Pattern, Scoring, StepLayout
from promptq.worker.engine.decoders.kernels.activation import silu_and_multiply
from promptq.worker.engine.decoders.kernels.fp8_product import rounded
from promptq.worker.engine.decoders.kernels.heads import place_heads
from promptq.worker.engine.decoders.kernels.norm import add_rms_norm
from promptq.worker.engine.decoders.kernels.quantized_product import FEW_ROWS, QuantizedProduct
from promptq.worker.engine.quantization.weight import QuantizedWeight
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
    """`kernel`, `shared` bytes, `registers` a thread, `stack` bytes of spilled registers, `loop`:
    the instructions of the longest loop, `waits`: how many reads may be under way at each wait for
    reads, and `buffers`: how many tiles each buffer in shared memory holds."""
    usage = _dump(compiled, "--dump-resource-usage")
    registers, stack = re.findall(r"\b(?:REG|STACK):(\d+)", usage)
    text = compiled.asm["ttgir"]
    return {
        "kernel": name,
        "shared": compiled.metadata.shared,
        "registers": int(registers),
        "stack": int(stack),
        "loop": _longest_loop(_dump(compiled, "--dump-sass")),
        "waits": [int(num) for num in re.findall(r"async_wait.*\{num = (\d+)", text)],
        "buffers": [int(num) for num in re.findall(r"local_alloc : .*memdesc<(\d+)x\d+x\d", text)],
    }


def _dump(compiled: Any, what: str) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), what, file.name]
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
    step = [(1000, 1)] * 4 + [(300, 200)]
    plain, *others = product(
        (Shape(32, 8, 128, 128), Shape(12, 4, 192, 128)),
        ((Pattern("full"), None), (Pattern("sliding", 128), 30.0)),
    )
    for shape, (pattern, softcap) in (plain, Random(int(sys.argv[2])).choice(others)):
        case = Case(step, shape, dtype=torch.bfloat16, device=torch.device("cpu"), seed=1)
        sinks = None if softcap is None else case.sinks
        case.attend(TritonPaged(), Scoring(0.1, pattern, softcap, sinks))
    if architecture >= 90:
        in_fp8, cpu = torch.float8_e4m3fn, torch.device("cpu")
        case = Case(step, plain[0], dtype=torch.bfloat16, kept=in_fp8, device=cpu, seed=1)
        case.attend(TritonPaged(), Scoring(0.1, Pattern("full")))
    choose_tokens(torch.zeros(4, 150_000, dtype=torch.bfloat16), torch.zeros(5, 4).double())
    launch_fused(architecture, hidden=4096, num_heads=32, num_kv_heads=8, size=128)


def launch_fused(
    architecture: int, *, hidden: int, num_heads: int, num_kv_heads: int, size: int
) -> None:
    """The kernels of the fused decoder, for a model of these sizes."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    places = torch.zeros(2, dtype=torch.int64)
    layout = StepLayout(0, [], [], places.unsqueeze(1), places, places, 16)
    cache = LayerCache(*(empty(4, num_kv_heads, 16, size) for _ in range(2)))
    qkv = empty(2, (num_heads + 2 * num_kv_heads) * size)
    cosine, sine = empty(9, size), empty(9, size)
    place_heads(qkv, places, cosine, sine, empty(2, size), 1e-6, cache, layout)
    silu_and_multiply(empty(2, 6 * hidden))
    outputs = (num_heads + 2 * num_kv_heads) * size
    numbers = torch.zeros(outputs, hidden, dtype=torch.uint8)
    for bits, group, has_offsets in (
        *((8, hidden, False), (8, 16, True)),
        *((4, 32, False), (4, 32, True), (4, 128, True)),
    ):
        factors = torch.zeros(outputs, hidden // group)
        offsets = factors if has_offsets else None
        weight = QuantizedWeight.pack(numbers, factors, bits, group, offsets)
        if bits == 4:  # as on a card
            offsets = None if weight.offsets is None else weight.offsets.half()
            weight = replace(weight, scales=weight.scales.half(), offsets=offsets)
        product = QuantizedProduct(weight, empty(outputs))
        for num_rows in (2, 64, FEW_ROWS + 1):
            product(empty(num_rows, hidden))
    for width in (hidden, 4 * hidden):  # also of the widest models
        rows = empty(2, width)
        add_rms_norm(rows, rows, empty(width), 1e-6)
        if architecture >= 90:  # also from 89 on, which is not compiled for here
            rounded(rows)


if __name__ == "__main__":
    main()
