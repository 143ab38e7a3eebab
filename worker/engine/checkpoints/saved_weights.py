"""Weights that another tool quantized."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from promptq.worker.engine.quantization.modules import FewBits


@dataclass(slots=True)
class SavedWeights:
    """The weights of a quantized checkpoint."""

    format: str
    """Name of the format, such as `gptq`. Empty if no weight is quantized."""
    dtype: torch.dtype
    """The dtype in which the model computes."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """All parameters by name, in `dtype`. A quantized one has only its shape, and no memory, until
    it is widened."""
    quantized: dict[str, FewBits] = field(default_factory=dict)
    """The weights that have fewer bits, by the name of their module."""

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a parameter that is not quantized."""
        self.tensors[name] = tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def add(self, module: str, weight: FewBits | torch.Tensor) -> None:
        """Adds the weight of a linear layer or an embedding."""
        if not isinstance(weight, torch.Tensor):
            self.quantized[module] = weight
            weight = weight.scales.new_zeros(1, dtype=self.dtype).expand(weight.shape)
        self.add_tensor(f"{module}.weight", weight)

    def widen(self, module: str) -> None:
        """Replaces the tensor without memory by the weight's numbers in `dtype`."""
        self.add_tensor(f"{module}.weight", self.quantized[module].dequantized())
