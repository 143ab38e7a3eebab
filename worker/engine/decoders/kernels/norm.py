"""Computes a residual sum and its norm in one kernel.

The kernel rounds where transformers' modules round: after each operation, with the exceptions that
NormFormula describes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from promptq.worker.engine.decoders.norm_parts import Norm

_IS_CENTERED = tl.constexpr(2)
_ADDS_ONE = tl.constexpr(4)
_ROUNDS_TWICE = tl.constexpr(8)
_HAS_BIAS = tl.constexpr(16)


def code_of(norm: Norm | None) -> int:
    """Returns an integer that describes a norm to a kernel; 0 if there is no norm."""
    if norm is None:
        return 0
    formula = norm.formula
    has_bias = norm.bias is not None
    flags = (True, formula.is_centered, formula.adds_one, formula.rounds_twice, has_bias)
    return sum(1 << bit for bit, flag in enumerate(flags) if flag)


def add_norm(
    hidden: torch.Tensor,
    update: torch.Tensor | None,
    before: Norm | None,
    after: Norm | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Compute `hidden += scale * after(update)` in place, for tensors [T, hidden size]. Returns
    `before(hidden)`, or `hidden` if `before` is None. `after` and `before` are norms. Without an
    `update`, `hidden` may be some columns of a larger tensor."""
    if update is None and before is None:
        return hidden
    output = hidden if before is None else torch.empty_like(hidden)
    _add_norm(hidden, update, before, after, scale, output)
    return output


def norm_columns(rows: torch.Tensor, norm: Norm) -> None:
    """Normalise `rows` [T, size], which may be some columns of a larger tensor, in place."""
    _add_norm(rows, None, norm, None, 1.0, rows)


def _add_norm(
    hidden: torch.Tensor,
    update: torch.Tensor | None,
    before: Norm | None,
    after: Norm | None,
    scale: float,
    output: torch.Tensor,
) -> None:
    num_rows, size = hidden.shape
    tile = triton.next_power_of_2(size)
    _add_norm_kernel[(num_rows,)](
        hidden,
        hidden if update is None else update,
        *_arguments(after, hidden),
        *_arguments(before, hidden),
        scale,
        output,
        hidden.stride(0),
        output.stride(0),
        HAS_UPDATE=update is not None,
        HAS_SCALE=scale != 1.0,
        AFTER=code_of(after),
        BEFORE=code_of(before),
        SIZE=size,
        TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
    )


def _arguments(norm: Norm | None, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Returns the norm's weight, bias and epsilon. `other` replaces a missing tensor."""
    if norm is None:
        return other, other, 0.0
    return norm.weight, other if norm.bias is None else norm.bias, norm.epsilon


@triton.jit
def moments(
    rows: tl.tensor, within: tl.tensor, epsilon: tl.tensor, NORM: tl.constexpr, SIZE: tl.constexpr
) -> tl.tuple:
    """Returns the mean that a norm subtracts from `rows` [rows, columns], and the factor for the
    difference, both [rows, 1]. `within` is false for padding columns beyond SIZE."""
    mean = tl.zeros((rows.shape[0], 1), tl.float32)
    if _IS_CENTERED & NORM:
        mean = tl.sum(tl.where(within, rows, 0.0), 1, keep_dims=True) / SIZE
    centered = tl.where(within, rows - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(centered * centered, 1, keep_dims=True) / SIZE + epsilon)


@triton.jit
def normed(
    rows: tl.tensor,
    mean: tl.tensor,
    rate: tl.tensor,
    weights: tl.tensor,
    biases: tl.tensor,
    mask: tl.tensor,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Returns the norm of `rows`: fp32 numbers that are rounded to DTYPE. `weights` and `biases`
    are pointers to each number's weight and bias."""
    rows = (rows - mean) * rate
    if _ROUNDS_TWICE & NORM:
        rows = rows.to(DTYPE).to(tl.float32)
    factor = tl.load(weights, mask=mask, other=0.0).to(tl.float32)
    if _ADDS_ONE & NORM:
        factor += 1.0
        if _IS_CENTERED & NORM:  # see NormFormula.factor
            factor = factor.to(DTYPE).to(tl.float32)
    rows *= factor
    if _HAS_BIAS & NORM:
        rows += tl.load(biases, mask=mask, other=0.0).to(tl.float32)
    return rows.to(DTYPE).to(tl.float32)


@triton.jit
def _add_norm_kernel(
    hidden: tl.tensor,
    update: tl.tensor,
    after_weight: tl.tensor,
    after_bias: tl.tensor,
    after_epsilon: tl.tensor,
    before_weight: tl.tensor,
    before_bias: tl.tensor,
    before_epsilon: tl.tensor,
    scale: tl.tensor,
    output: tl.tensor,
    stride: tl.tensor,
    output_stride: tl.tensor,
    HAS_UPDATE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    AFTER: tl.constexpr,
    BEFORE: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    dtype = hidden.dtype.element_ty
    index = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)[None, :]
    within = column < SIZE
    place = index * stride + column
    row = tl.load(hidden + place, mask=within, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        added = tl.load(update + index * SIZE + column, mask=within, other=0.0).to(tl.float32)
        if AFTER:
            mean, rate = moments(added, within, after_epsilon, AFTER, SIZE)
            weights, biases = after_weight + column, after_bias + column
            added = normed(added, mean, rate, weights, biases, within, AFTER, dtype)
        if HAS_SCALE:
            added = (added * scale).to(dtype).to(tl.float32)
        row = (row + added).to(dtype).to(tl.float32)
        tl.store(hidden + place, row, mask=within)
    if BEFORE:
        mean, rate = moments(row, within, before_epsilon, BEFORE, SIZE)
        weights, biases = before_weight + column, before_bias + column
        row = normed(row, mean, rate, weights, biases, within, BEFORE, dtype)
        tl.store(output + index * output_stride + column, row, mask=within)
