"""Computes the RMS norm of a recurrent layer's result, with its gate, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from promptq.worker.engine.recurrent.parts import GatedNorm


def gated_norm(read: torch.Tensor, gates: torch.Tensor, norm: GatedNorm | None) -> torch.Tensor:
    """Returns `norm(read) * silu(gates)`, rounded once to the dtype of `gates`. With
    `norm.is_sigmoid`, the sigmoid replaces SiLU. With `norm.gates_first`, the norm follows the
    product. All are [T, values]. `read` is in fp32. `gates` may be strided."""
    num_rows, num_values = read.shape
    group = num_values if norm is None else norm.group
    output = gates.new_empty(num_rows, num_values)
    tile = triton.next_power_of_2(group)
    _gated_norm_kernel[(num_rows, num_values // group)](
        read,
        gates,
        read if norm is None else norm.weight,
        0.0 if norm is None else norm.epsilon,
        output,
        gates.stride(0),
        HAS_NORM=norm is not None,
        GATES_FIRST=norm is not None and norm.gates_first,
        IS_SIGMOID=norm is not None and norm.is_sigmoid,
        NUM_VALUES=num_values,
        NUM_WEIGHTS=group if norm is None else len(norm.weight),
        GROUP=group,
        TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
    )
    return output


@triton.jit
def _gated_norm_kernel(
    read: tl.tensor,
    gates: tl.tensor,
    weights: tl.tensor,
    epsilon: tl.tensor,
    output: tl.tensor,
    stride: tl.tensor,
    HAS_NORM: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP
    column = tl.arange(0, TILE)
    within = column < GROUP
    place = row * NUM_VALUES + first + column
    x = tl.load(read + place, mask=within, other=0.0)
    gate = tl.load(gates + row * stride + first + column, mask=within, other=0.0).to(tl.float32)
    gate = tl.sigmoid(gate) if IS_SIGMOID else gate * tl.sigmoid(gate)
    if GATES_FIRST:
        x *= gate
    if HAS_NORM:
        x *= tl.rsqrt(tl.sum(x * x, 0) / GROUP + epsilon)
        weight = weights + first % NUM_WEIGHTS + column
        x *= tl.load(weight, mask=within, other=0.0).to(tl.float32)
    if not GATES_FIRST:
        x *= gate
    tl.store(output + place, x, mask=within)
