"""Unpacks the integers of AWQ, GPTQ and compressed-tensors checkpoints.

`QuantizedWeight.pack` then packs the integers in the order that promptq's matrix products read.
"""

from __future__ import annotations

import torch

from promptq.worker.engine.quantization.weight import QuantizedWeight


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks int32 [..., words] to uint8 [..., words * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = words.unsqueeze(-1) >> shifts & (1 << bits) - 1
    return numbers.to(torch.uint8).flatten(-2)


def weight_of(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    inputs: int,
    groups: torch.Tensor | None = None,
) -> QuantizedWeight | torch.Tensor:
    """Returns the weight `scale * (n - zero)` for unsigned `numbers` [outputs, `inputs`].

    `scales` (fp32) and `zeros` are [outputs, groups]. Without `zeros`, each zero is the middle of
    the range of numbers. `groups` [inputs] has the group of each input. If the inputs of a group
    are not adjacent, returns an fp32 tensor.
    """
    middle, group = 1 << (bits - 1), -(-inputs // scales.shape[1])
    offsets = None
    if zeros is not None and not bool((zeros == middle).all()):
        offsets = -zeros.float() * scales
    if groups is None or bool((groups == torch.arange(len(groups)) // group).all()):
        return QuantizedWeight.pack(numbers, scales, bits, group, offsets)
    groups = groups.long()
    offsets = -middle * scales if offsets is None else offsets
    return numbers.float() * scales[:, groups] + offsets[:, groups]
