"""Splits the dense MLP of a layer into its parts, and recognises its activation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import XIELUActivation

from promptq.worker.engine.decoders.named_parts import linears_of, parts_of
from promptq.worker.engine.decoders.norm_parts import NotOfThisKindError, require

_INPUTS = (("gate_proj", "up_proj"), ("gate_up_proj",), ("up_proj",))

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
}
"""Known activations without parameters, in the order of native/src/layers/activation.h."""


class XIELU(NamedTuple):
    """An activation (https://arxiv.org/abs/2411.13010) with learned parameters for each layer:
    `positive * x^2 + slope * x` above 0, else `negative * (e^min(x, most) - 1 - x) + slope * x`."""

    positive: float
    negative: float
    slope: float
    most: float

    @classmethod
    def of(cls, module: Any) -> XIELU:
        """Returns the parameters of transformers' module, rounded to the module's dtype."""
        if module.alpha_p.is_meta:  # the weights have no values yet
            return cls(0.0, 0.0, 0.0, 0.0)
        learned = module.alpha_p.detach(), module.alpha_n.detach()
        positive, negative = map(nn.functional.softplus, learned)
        numbers = positive, module.beta + negative, module.beta, module.eps
        return cls(*map(float, numbers))


@dataclass(frozen=True, slots=True)
class DenseMLP:
    """A dense MLP: `down(activation(scale * gate(x)) * up(x))`. An MLP without a gate computes
    `down(activation(scale * up(x)))`."""

    inputs: tuple[nn.Linear, ...]
    """Linear layers whose joined outputs are the gate (if there is one), followed by `up`."""
    down: nn.Linear
    is_gated: bool
    activation: str
    """The activation's name in ACTIVATIONS, or `xielu`."""
    gate_scale: float
    curve: XIELU | None = None
    """The parameters of `xielu`."""

    @classmethod
    def of(cls, mlp: Any) -> DenseMLP:
        """Returns the parts of an MLP. Raises NotOfThisKindError if the MLP has an unknown part."""
        parts = parts_of(mlp)
        names = parts.keys() - {"down_proj", "act_fn"}
        inputs = next((each for each in _INPUTS if names == {*each}), ())
        require(bool(inputs and "down_proj" in parts), f"an MLP of {sorted(parts)}")
        activation = parts.get("act_fn", nn.functional.silu)
        is_curve = type(activation) is XIELUActivation
        return cls(
            inputs=linears_of(parts, inputs),
            down=linears_of(parts, ("down_proj",))[0],
            is_gated=inputs != ("up_proj",),
            activation="xielu" if is_curve else activation_of(activation),
            gate_scale=getattr(mlp, "gate_multiplier", 1.0),
            curve=XIELU.of(activation) if is_curve else None,
        )

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (*self.inputs, self.down)


def activation_of(module: Any) -> str:
    """Returns the activation's name in ACTIVATIONS. Raises NotOfThisKindError if the activation is
    unknown."""
    probe = torch.linspace(-40.0, 40.0, 321, device="cpu")  # beyond the bounds of some activations
    try:
        found = module(probe)
    except Exception:  # its parameters may be on any device
        found = torch.full_like(probe, torch.nan)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(found, known(probe), rtol=1e-5, atol=1e-6):
            return name
    raise NotOfThisKindError(f"it has an activation of type {type(module).__name__}")
