"""Weights of a layer's experts, as the library stores them, and the experts' sum in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class ExpertWeights(NamedTuple):
    """The weights of one expert, [outputs, inputs]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def has_experts(module: Any) -> bool:
    """Whether a module of the library has experts as `expert_weights` takes them."""
    tensors = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    are_fused = all(isinstance(each, torch.Tensor) and each.ndim == 3 for each in tensors)
    return are_fused and getattr(module, "has_post_expert_norm", True) is False


def take_any_sizes(model: Any) -> None:
    """Makes the library multiply experts one by one if their rows have a size that its grouped
    products refuse."""
    experts = [module for module in model.modules() if has_experts(module)]
    rows = [
        weight.shape[1 if module.is_transposed else 2] * weight.itemsize
        for module in experts
        for weight in (module.gate_up_proj, module.down_proj)
    ]
    if any(num_bytes % 16 for num_bytes in rows):
        model.set_experts_implementation("eager")


def expert_weights(module: Any, index: int) -> ExpertWeights:
    """Returns the weights of an expert: views, unless the library stores them transposed."""
    gate_up, down = module.gate_up_proj[index], module.down_proj[index]
    if module.is_transposed:
        gate_up, down = gate_up.T, down.T
    gate, up = gate_up.chunk(2) if module.is_concatenated else (gate_up[::2], gate_up[1::2])
    return ExpertWeights(gate.contiguous(), up.contiguous(), down.contiguous())


def sum_of_experts(
    module: nn.Module,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    weights_of: Callable[[int], ExpertWeights],
) -> torch.Tensor:
    """Computes in fp32 what the experts' module computes. `weights_of` returns the weights of an
    expert, because those of all experts in fp32 may need too much memory."""
    experts: Any = module
    hidden = hidden.float()
    total = torch.zeros_like(hidden)
    for index in sorted(set(chosen.flatten().tolist())):
        rows, slots = (chosen == index).nonzero(as_tuple=True)
        weights = weights_of(index)
        gate, up = (nn.functional.linear(hidden[rows], each.float()) for each in weights[:2])
        gate_up = torch.stack([gate, up], -1).flatten(-2)
        if experts.is_concatenated:
            gate_up = torch.cat([gate, up], -1)
        if experts.has_bias:
            gate_up = gate_up + experts.gate_up_proj_bias[index].float()
        down = nn.functional.linear(experts._apply_gate(gate_up), weights.down.float())
        if experts.has_bias:
            down = down + experts.down_proj_bias[index].float()
        total.index_add_(0, rows, down * shares[rows, slots, None].float())
    return total
