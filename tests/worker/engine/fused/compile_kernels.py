"""Compile the fused kernels for cards that need not be there: `... compile_kernels.py 80 90`.

The launchers run as ever, but each launch ends with the machine code. Prints architecture, kernel,
registers, and bytes of stack (where numbers lie for which there are no registers) of each.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from promptq.worker.engine.attention.backend import LayerCache, StepLayout
from promptq.worker.engine.fused.activation import silu_and_multiply
from promptq.worker.engine.fused.heads import Rotary, place_heads
from promptq.worker.engine.fused.norm import add_rms_norm
from tests.worker.engine.attention.compile_kernels import NoDriver

READER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Card(NoDriver):
    """Each architecture is a device of its own, because Triton keeps what it compiled for one."""

    def get_current_device(self) -> int:
        return self.get_current_target().arch


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its bytes of stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [READER, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return int(registers), int(stack)


def main() -> None:
    launch = JITFunction.run
    architecture = 0

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = launch(self, *args, warmup=True, **kwargs)
        print(architecture, self.__name__, *resources(compiled.asm["cubin"]))
        return compiled

    JITFunction.run = compile_only
    for architecture in map(int, sys.argv[1:]):
        driver.set_active(Card(architecture))
        launch_all(hidden=4096, num_heads=32, num_kv_heads=8, size=128)


def launch_all(hidden: int, num_heads: int, num_kv_heads: int, size: int) -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    places = torch.zeros(2, dtype=torch.int64)
    layout = StepLayout(0, [], [], places.unsqueeze(1), places, places, 16)
    cache = LayerCache(*(empty(4, num_kv_heads, 16, size) for _ in range(2)))
    qkv = empty(2, (num_heads + 2 * num_kv_heads) * size)
    rotary = Rotary(empty(9, size), empty(9, size))
    place_heads(qkv, places, rotary, empty(2, size), 1e-6, cache, layout)
    silu_and_multiply(empty(2, 6 * hidden))
    for width in (hidden, 4 * hidden):  # also of the widest models
        rows = empty(2, width)
        add_rms_norm(rows, rows, empty(width), 1e-6)


if __name__ == "__main__":
    main()
