"""Computes decays, update rates and inverse vector lengths for the tokens of a recurrence."""

from __future__ import annotations

import triton
import triton.language as tl

_EPSILON = tl.constexpr(1e-6)


@triton.jit
def inverse_lengths(vectors: tl.tensor) -> tl.tensor:
    """Returns the factors [rows] that scale each of `vectors` [rows, key size] to length 1."""
    vectors = vectors.to(tl.float32)
    return tl.rsqrt(tl.sum(vectors * vectors, 1) + _EPSILON)


@triton.jit
def rates_of(
    rates: tl.tensor,
    is_row: tl.tensor,
    head: tl.tensor,
    decays: tl.tensor,
    biases: tl.tensor,
    least_time: tl.tensor,
    most_time: tl.tensor,
    most_rate: tl.tensor,
    NUM_HEADS: tl.constexpr,
    IS_DELTA: tl.constexpr,
) -> tl.tuple:
    """Returns two tensors [rows] for one value head: the logarithm of the decay, and the update
    rate. Both are zero where `is_row` is false.

    `rates` [rows] points to the numbers that the model computed for each row. In the delta rule
    these are an update rate for each head, then a time step for each head. Without the delta rule
    there are only time steps, and a head's time step is also the update rate.
    """
    column = head + NUM_HEADS if IS_DELTA else head
    time = times_of(rates + column, biases + head, is_row, least_time, most_time)
    rate = time
    if IS_DELTA:
        rate = tl.load(rates + head, mask=is_row, other=0.0).to(tl.float32)
        rate = tl.where(is_row, most_rate * tl.sigmoid(rate), 0.0)
    return time * tl.load(decays + head), rate


@triton.jit
def times_of(
    numbers: tl.tensor,
    biases: tl.tensor,
    mask: tl.tensor,
    least_time: tl.tensor,
    most_time: tl.tensor,
) -> tl.tensor:
    """Returns the time steps: the softplus of `numbers + biases`, limited to the range from
    `least_time` to `most_time`. Returns 0 outside of `mask`. `numbers` and `biases` are
    pointers."""
    time = softplus(tl.load(numbers, mask=mask, other=0.0).to(tl.float32) + tl.load(biases))
    return tl.where(mask, tl.minimum(tl.maximum(time, least_time), most_time), 0.0)


@triton.jit
def key_decays(
    rates: tl.tensor,
    biases: tl.tensor,
    decays: tl.tensor,
    mask: tl.tensor,
    head: tl.tensor,
    key: tl.tensor,
    least_time: tl.tensor,
    most_time: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
) -> tl.tensor:
    """Returns [rows, keys]: the logarithm of the decay of each number of a head's keys. Results
    outside of `mask` are 0. `rates` [rows, 1] points to each row's update rates, and the row's time
    steps follow."""
    column = head * KEY_SIZE + tl.where(key < KEY_SIZE, key, 0)[None, :]
    times = times_of(rates + NUM_HEADS + column, biases + column, mask, least_time, most_time)
    return times * tl.load(decays + head)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Returns `log(1 + exp(x))`. Small results are as precise as large ones (Kahan's log1p)."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    step = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    return tl.maximum(x, 0.0) + tl.where(rounded == 1.0, small, tl.log(rounded) * (small / step))
