"""`silu(gate) * up` in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns `silu(gate) * up` [T, size] for `gate_up` [T, 2 * size]. Like the library's modules,
    it rounds both `silu(gate)` and the product."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_rows, size)
    _silu_kernel[(num_rows, triton.cdiv(size, TILE))](
        gate_up, output, SIZE=size, TILE=TILE, num_warps=4
    )
    return output


@triton.jit
def _silu_kernel(
    gate_up: tl.tensor, output: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr
) -> None:
    """One program for each row and tile of its columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    within = column < SIZE
    source = gate_up + 2 * row * SIZE + column
    gate = tl.load(source, mask=within, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=within, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(gate_up.dtype.element_ty)
    tl.store(output + row * SIZE + column, activated.to(tl.float32) * up, mask=within)
