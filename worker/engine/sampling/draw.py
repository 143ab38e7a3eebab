"""Draws tokens by inverse transform sampling: from cumulative weights, in vocabulary order."""

from __future__ import annotations

import torch

BLOCK = 256


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns token ids [R], one drawn from each row of `weights` [R, vocab_size]. Weights are at
    least 0, and need not be normalised.

    The drawn token is the first one whose cumulative weight exceeds `uniforms` [R] (float64, in [0,
    1)) times the total. A token of weight 0 is never drawn. The search first finds a block of BLOCK
    successive tokens, and then the token in this block.
    """
    vocab_size = weights.shape[1]
    cumulative = _block_sums(weights).cumsum(dim=1)
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = cumulative.gather(1, (block - 1).clamp_min(0)).masked_fill(block == 0, 0.0)
    target = (target - before).clamp_min(0.0)

    # The last block may be short. Its missing places stand for the last token, with weight 0.
    places = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, places.clamp_max(vocab_size - 1)).double()
    inside.masked_fill_(places >= vocab_size, 0.0)
    return (block * BLOCK + _first_above(inside.cumsum(dim=1), target)).squeeze(1)


def totals(weights: torch.Tensor) -> torch.Tensor:
    """Returns the sum of each row: [R, 1], float64."""
    return _block_sums(weights).sum(dim=1, keepdim=True)


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Returns the sum of each block: [R, number of blocks], float64."""
    vocab_size = weights.shape[1]
    whole = vocab_size // BLOCK * BLOCK
    sums = weights[:, :whole].view(len(weights), -1, BLOCK).sum(dim=2)
    if whole < vocab_size:
        sums = torch.cat([sums, weights[:, whole:].sum(dim=1, keepdim=True)], dim=1)
    return sums.double()


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns [R, 1]: the first index at which `cumulative` exceeds `target`. If rounding keeps all
    sums from exceeding `target`, returns the last index with a weight above 0."""
    above = (cumulative <= target).sum(dim=1, keepdim=True)
    last = (cumulative < cumulative[:, -1:]).sum(dim=1, keepdim=True)
    return torch.minimum(above, last)
