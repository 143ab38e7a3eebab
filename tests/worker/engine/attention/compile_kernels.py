"""Compile the Triton kernels for a card that need not be there: `... compile_kernels.py 90`.

The launchers run as ever, but each launch ends with the machine code. Prints kernel and shared
memory of each.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.cases import Case, Shape
from promptq.worker.engine.attention.backend import Pattern, Scoring
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.sampling.top_p_kernel import top_p_thresholds


class NoDriver:
    """Tells the compiler of a card of the given architecture."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def main() -> None:
    driver.set_active(NoDriver(int(sys.argv[1])))
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = launch(self, *args, warmup=True, **kwargs)
        assert compiled.asm["cubin"]
        print(self.__name__, compiled.metadata.shared)
        return compiled

    JITFunction.run = compile_only
    step = [(1000, 1)] * 4 + [(300, 200)]
    for shape in (Shape(32, 8, 128, 128), Shape(12, 4, 192, 128)):
        for pattern, softcap in ((Pattern("full"), None), (Pattern("sliding", 128), 30.0)):
            case = Case(step, shape, dtype=torch.bfloat16, device=torch.device("cpu"), seed=1)
            sinks = None if softcap is None else case.sinks
            case.attend(TritonPaged(), Scoring(0.1, pattern, softcap, sinks))
    column = torch.zeros(4, 1)
    top_p_thresholds(torch.zeros(4, 150_000), column, column.double(), lowest=-60.0)


if __name__ == "__main__":
    main()
