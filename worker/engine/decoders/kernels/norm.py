"""A residual sum and its RMS norm in one kernel.

The kernel rounds where the library's modules round: the sum, the normed row, and its product with
the weight have the model's dtype. All else is in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def add_rms_norm(
    hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Adds `update` to `hidden`, both [T, hidden size], in place. Returns the norm of the sum."""
    num_rows, size = hidden.shape
    tile = triton.next_power_of_2(size)
    output = torch.empty_like(hidden)
    _add_rms_norm_kernel[(num_rows,)](
        hidden,
        hidden if update is None else update,
        weight,
        output,
        epsilon,
        HAS_UPDATE=update is not None,
        SIZE=size,
        TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
    )
    return output


@triton.jit
def _add_rms_norm_kernel(
    hidden: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    epsilon: tl.tensor,
    HAS_UPDATE: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program for each row."""
    dtype = hidden.dtype.element_ty
    start = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, TILE)
    within = column < SIZE
    row = tl.load(hidden + start + column, mask=within, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        added = tl.load(update + start + column, mask=within, other=0.0).to(tl.float32)
        row = (row + added).to(dtype).to(tl.float32)
        tl.store(hidden + start + column, row, mask=within)
    rate = tl.rsqrt(tl.sum(row * row, 0) / SIZE + epsilon)
    normed = (row * rate).to(dtype).to(tl.float32)
    weights = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)
    tl.store(output + start + column, normed * weights, mask=within)
