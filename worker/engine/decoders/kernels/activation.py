"""Computes activations of MLPs, with their gates, in one kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from promptq.worker.engine.decoders.expert_parts import Limits
from promptq.worker.engine.decoders.mlp_parts import ACTIVATIONS

TILE = 1024
_UNLIMITED = Limits()
_SILU, _GELU, _GELU_TANH, _RELU, _RELU2 = map(tl.constexpr, range(len(ACTIVATIONS)))
_ROOT_HALF = tl.constexpr(0.5**0.5)
_SLOPE = tl.constexpr((8 / math.pi) ** 0.5)


@dataclass(frozen=True, slots=True)
class Activation:
    """Computes `activation(gate) * up`, or `activation(up)` if there is no gate. Rounds both the
    activation and the product, like transformers' modules."""

    name: str
    """The activation's name in ACTIVATIONS."""
    is_gated: bool = True
    is_interleaved: bool = False
    """Whether numbers of the gate and of `up` alternate. If not, the whole gate comes first."""
    limits: Limits = _UNLIMITED
    """The limits of the activation `limited`, whose result is rounded only once."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns [T, size]. `inputs` are [T, 2 * size], or [T, size] if there is no gate."""
        num_rows, size = inputs.shape
        size = size // 2 if self.is_gated else size
        output = inputs.new_empty(num_rows, size)
        _activation_kernel[(num_rows, triton.cdiv(size, TILE))](
            inputs,
            output,
            self.limits.alpha,
            self.limits.limit,
            ACTIVATION=[*ACTIVATIONS].index(self.name),
            IS_GATED=self.is_gated,
            IS_INTERLEAVED=self.is_interleaved,
            IS_LIMITED=self.limits.limit > 0.0,
            SIZE=size,
            TILE=TILE,
            num_warps=4,
        )
        return output


@triton.jit
def _activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == _SILU:
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == _GELU:
        x = 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))
    elif ACTIVATION == _GELU_TANH:  # (1 + tanh(y)) / 2 is the sigmoid of 2 y; exp(80) is finite
        x = x * tl.sigmoid(tl.maximum((x + 0.044715 * x * x * x) * _SLOPE, -80.0))
    else:
        x = tl.maximum(x, 0.0)
        if ACTIVATION == _RELU2:
            x = x * x
    return x


@triton.jit
def _activation_kernel(
    inputs: tl.tensor,
    output: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_LIMITED: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    dtype = inputs.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    within = column < SIZE
    STRIDE: tl.constexpr = 2 if IS_INTERLEAVED else 1
    source = inputs + (2 if IS_GATED else 1) * row * SIZE + STRIDE * column
    gate = tl.load(source, mask=within, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(source + (1 if IS_INTERLEAVED else SIZE), mask=within, other=0.0)
        up = up.to(tl.float32)
    if IS_LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        result = gate * tl.sigmoid(alpha * gate) * up
    else:
        result = _activated(gate, ACTIVATION)
        if IS_GATED:
            result = result.to(dtype).to(tl.float32) * up
    tl.store(output + row * SIZE + column, result, mask=within)
