"""Packs integers of 4 bits. Two successive inputs share a byte, the first in its lower half.

native/src/quantizing.cpp uses the same order for weights that promptq rounds. Matrix products
unpack the integers in registers (decoders/kernels/quantized_product.py,
native/src/machine/integers.h).
"""

from __future__ import annotations

import torch
from torch import nn


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """Packs numbers below 16, uint8 [outputs, inputs], to uint8 [outputs, ceil(inputs / 2)]."""
    numbers = nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def unpack_int4(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """Unpacks uint8 [..., ceil(inputs / 2)] to fp32 [..., inputs]."""
    halves = packed.new_empty(*packed.shape, 2, dtype=torch.float32)
    halves[..., 0], halves[..., 1] = packed & 15, packed >> 4
    return halves.flatten(-2)[..., :inputs]
