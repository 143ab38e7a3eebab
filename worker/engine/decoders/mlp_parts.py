"""The dense MLP of a layer, and what its activation computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from promptq.worker.engine.decoders.norm_parts import NotOfThisKindError

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
}
"""Known activations, in the order of native/src/layers/activation.h."""


@dataclass(frozen=True, slots=True)
class DenseMLP:
    """`down(activation(scale * gate(x)) * up(x))`, or without a gate
    `down(activation(scale * up(x)))`."""

    inputs: tuple[nn.Linear, ...]
    """Their outputs, one after the other, are those of the gate, if there is one, and `up`."""
    down: nn.Linear
    is_gated: bool
    activation: str
    """Its name in ACTIVATIONS."""
    gate_scale: float

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (*self.inputs, self.down)


def activation_of(module: Any) -> str:
    """Returns its name in ACTIVATIONS. Raises NotOfThisKindError if the activation is unknown."""
    probe = torch.linspace(-40.0, 40.0, 321, device="cpu")  # beyond the bounds of some activations
    try:
        found = module(probe)
    except Exception:  # it may have parameters anywhere
        found = torch.full_like(probe, torch.nan)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(found, known(probe), rtol=1e-5, atol=1e-6):
            return name
    raise NotOfThisKindError(f"it has an activation of type {type(module).__name__}")
