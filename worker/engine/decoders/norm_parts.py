"""Finds out which formula a norm of a transformers model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call


class NotOfThisKindError(Exception):
    """Raised if promptq's decoders do not support a part of a model. The message names the part."""


def require(holds: bool, otherwise: str) -> None:
    """Raise NotOfThisKindError with the message `it has {otherwise}` if `holds` is false."""
    if not holds:
        raise NotOfThisKindError(f"it has {otherwise}")


Found = dict[tuple[Any, ...], Any]
"""Cache of formulas that were found, by the type and sizes of a module."""


@dataclass(frozen=True, slots=True)
class NormFormula:
    """A norm's formula: `normalised * weight + bias`, computed in fp32."""

    is_centered: bool
    """Whether the mean is subtracted first, as in a LayerNorm."""
    adds_one: bool
    """Whether the factor is `1 + weight`."""
    rounds_twice: bool
    """Whether the row is rounded both before and after the multiplication by the weight."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
    ) -> torch.Tensor:
        row = x.float()
        row = row - row.mean(-1, keepdim=True) if self.is_centered else row
        row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + epsilon)
        row = row.to(x.dtype).float() if self.rounds_twice else row
        row = row * self.factor(weight)
        return (row if bias is None else row + bias.float()).to(x.dtype)

    def factor(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the factor of a normalised row, in fp32: `weight` or `1 + weight`."""
        if self.adds_one and self.is_centered:  # Nemotron's module rounds the sum, Gemma's does not
            return (weight + 1.0).float()
        return weight.float() + float(self.adds_one)


RMS_NORM = NormFormula(is_centered=False, adds_one=False, rounds_twice=True)
"""The norm of Llama."""

_FORMULAS = [
    NormFormula(is_centered, adds_one, rounds_twice)
    for is_centered in (False, True)
    for adds_one in (False, True)
    for rounds_twice in (True, False)
]


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of rows or of heads: its formula, with its weights."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float
    formula: NormFormula

    @classmethod
    def of(cls, module: Any, found: Found | None = None, size: int | None = None) -> Norm:
        """Returns the norm that a module computes. `found` is a cache of formulas. A norm without a
        weight needs `size`. Raises NotOfThisKindError if the module does not compute a norm."""
        found = {} if found is None else found
        name = type(module).__name__
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        has_weight = weight is not None
        if not has_weight and size is not None:
            weight = torch.ones(size, device="cpu")
        epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        if not (isinstance(weight, torch.Tensor) and weight.dim() == 1 and epsilon):
            raise NotOfThisKindError(f"it has a norm of type {name}")
        key = type(module), weight.shape, has_weight, bias is None, epsilon
        if key not in found:
            found[key] = _formula(module, weight.shape, float(epsilon))
        if (formula := found[key]) is None:
            raise NotOfThisKindError(f"it has a norm of type {name}")
        return cls(weight, bias, float(epsilon), formula)


def _formula(norm: Any, shape: torch.Size, epsilon: float) -> NormFormula | None:
    """Returns the formula that gives the module's results when both have the same random weights;
    None if no formula does. The module's real weights may be on another device, or unset."""
    generator = torch.Generator("cpu").manual_seed(0)
    names = [name for name, _ in norm.named_parameters()]
    if not {*names} <= {"weight", "bias"}:
        return None
    drawn = {name: torch.randn(shape, generator=generator, device="cpu") for name in names}
    rows = torch.randn(8, *shape, generator=generator, device="cpu") * 0.01
    ones = torch.ones(shape, device="cpu")

    def distances(dtype: torch.dtype) -> list[float]:
        x, given = rows.to(dtype), {name: each.to(dtype) for name, each in drawn.items()}
        wanted = functional_call(norm, given, (x,))
        weight, bias = given.get("weight", ones), given.get("bias")
        found = [formula(x, weight, bias, epsilon) for formula in _FORMULAS]
        return [float((each - wanted).abs().mean()) for each in found]

    exact, rounded = distances(torch.float32), distances(torch.bfloat16)
    near = [index for index, distance in enumerate(exact) if distance < 1e-5]
    return _FORMULAS[min(near, key=rounded.__getitem__)] if near else None
