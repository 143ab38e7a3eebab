"""Integers of a few bits that share words, as quantized checkpoints have them."""

from __future__ import annotations

import torch


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., words] to uint8 [..., words * 32 / bits], the lowest bits of a word first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = words.unsqueeze(-1) >> shifts & (1 << bits) - 1
    return numbers.to(torch.uint8).flatten(-2)


def offsets_of(zeros: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor | None:
    """The offsets where a number is `scale * (n - zero)`; None if all zeros are in the middle of
    the range."""
    if bool((zeros == 1 << (bits - 1)).all()):
        return None
    return -zeros.float() * scales.float()


def scattered(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    groups: torch.Tensor,
    bits: int,
) -> torch.Tensor:
    """Returns a weight [outputs, inputs] in fp32 whose inputs are in groups in any order.

    `groups` [inputs] has the group of each input; scales and offsets are [outputs, groups]."""
    groups = groups.long()
    if offsets is None:
        offsets = -(2 ** (bits - 1)) * scales
    return numbers.float() * scales[:, groups] + offsets[:, groups]


def are_in_order(groups: torch.Tensor, group: int) -> bool:
    """Whether the first `group` inputs are in group 0, the next ones in group 1, and so on."""
    return bool((groups == torch.arange(len(groups), device=groups.device) // group).all())
