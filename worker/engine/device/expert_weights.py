"""Reads the weights of experts (MoE) from transformers' modules, and computes experts in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

_TOLERANCE = 0.1
"""The largest relative difference between two results that rounding to 16 bits may cause."""


class ExpertWeights(NamedTuple):
    """The weights of one expert, [outputs, inputs]."""

    gate: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor


def has_experts(module: Any) -> bool:
    """Whether a transformers module has experts in the form that `expert_weights` reads."""
    if getattr(module, "has_post_expert_norm", True):
        return False
    names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
    tensors = [getattr(module, name, None) for name in names]
    are_fused = all(isinstance(each, torch.Tensor) and each.ndim == 3 for each in tensors)
    return are_fused and bool(module.has_gate or not module.has_bias)


def input_weights(module: Any) -> torch.Tensor:
    """Returns the gate and up weights of all experts, or the up weights if there are no gates."""
    weights: torch.Tensor = module.gate_up_proj if module.has_gate else module.up_proj
    return weights


def take_any_sizes(model: Any) -> None:
    """Make transformers multiply experts one by one if its grouped products do not support the
    sizes of the model's experts."""
    experts = [module for module in model.modules() if has_experts(module)]
    rows = [
        weight.shape[1 if module.is_transposed else 2] * weight.itemsize
        for module in experts
        for weight in (input_weights(module), module.down_proj)
    ]
    if any(num_bytes % 16 for num_bytes in rows):
        model.set_experts_implementation("eager")


def expert_weights(module: Any, index: int) -> ExpertWeights:
    """Returns views of the weights of one expert. The views need not be contiguous."""
    inputs, down = input_weights(module)[index], module.down_proj[index]
    if module.is_transposed:
        inputs, down = inputs.T, down.T
    gate, up = split_gates(module, inputs) if module.has_gate else (None, inputs)
    return ExpertWeights(gate, up, down)


def split_gates(module: Any, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits the rows of a joined weight. Returns the gate weight and the up weight."""
    if module.is_concatenated:
        gate, up = gate_up.chunk(2)
        return gate, up
    return gate_up[::2], gate_up[1::2]


def join_gates(module: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Joins `gate` and `up` [..., inner size] to a tensor [..., 2 * inner size], in the module's
    order."""
    if module.is_concatenated:
        return torch.cat([gate, up], -1)
    return torch.stack([gate, up], -1).flatten(-2)


def misread_experts(model: nn.Module) -> set[type[nn.Module]]:
    """Returns the classes of experts whose results differ from the results of `sum_of_experts`."""
    of_class = {type(module): module for module in model.modules() if has_experts(module)}
    return {kind for kind, module in of_class.items() if not _is_read(module)}


def _is_read(module: Any) -> bool:
    """Whether `sum_of_experts` and the module compute the same for a few rows of large numbers.
    Near 0, where the activation is nearly linear, an exchange of gate and up would change little.
    """
    num_experts = len(module.down_proj)
    weights = partial(expert_weights, module)
    generator = torch.Generator("cpu").manual_seed(0)
    rows = 10 * torch.randn(4, len(weights(0).down), generator=generator, device="cpu")
    hidden = rows.to(module.down_proj)
    chosen = torch.arange(8, device=hidden.device).view(4, 2) % num_experts
    shares = torch.linspace(0.1, 0.8, 8).to(hidden).view(4, 2)
    if num_experts == 1:
        chosen, shares = chosen[:, :1], shares[:, :1]
    found = sum_of_experts(module, hidden, chosen, shares, weights)
    off = found - module(hidden, chosen, shares)
    return bool(off.norm() <= _TOLERANCE * found.norm())


def sum_of_experts(
    module: nn.Module,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    weights_of: Callable[[int], ExpertWeights],
) -> torch.Tensor:
    """Returns the output of the experts' module, computed in fp32. For each row of `hidden`,
    `chosen` has the experts, and `shares` has the factors of the experts' outputs. `weights_of`
    returns the weights of one expert, because the fp32 weights of all experts may need too much
    memory."""
    experts: Any = module
    hidden = hidden.float()
    total = torch.zeros_like(hidden)
    for index in sorted(set(chosen.flatten().tolist())):
        rows, slots = (chosen == index).nonzero(as_tuple=True)
        weights = weights_of(index)
        inner = nn.functional.linear(hidden[rows], weights.up.float())
        if weights.gate is None:
            inner = experts.act_fn(inner)
        else:
            gate = nn.functional.linear(hidden[rows], weights.gate.float())
            gate_up = join_gates(experts, gate, inner)
            if experts.has_bias:
                gate_up = gate_up + experts.gate_up_proj_bias[index].float()
            inner = experts._apply_gate(gate_up)
        down = nn.functional.linear(inner, weights.down.float())
        if experts.has_bias:
            down = down + experts.down_proj_bias[index].float()
        total.index_add_(0, rows, down * shares[rows, slots, None].float())
    return total
