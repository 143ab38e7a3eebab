"""What is read of a checkpoint that another tool quantized."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from promptq.worker.engine.quantization.weight import QuantizedWeight


@dataclass(slots=True)
class SavedWeights:
    """The weights of a quantized checkpoint."""

    format: str
    """In words: `gptq`, for example. Empty if nothing has fewer bits than usual."""
    dtype: torch.dtype
    """What the model computes in."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """All parameters by name in `dtype`, also those that have fewer bits in the file."""
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    """By the name of their module, the weights whose numbers native code takes as they are."""

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter that is not quantized."""
        self.tensors[name] = tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def add(self, module: str, weight: QuantizedWeight | torch.Tensor) -> None:
        """The weight of a linear layer or an embedding, whose numbers are kept if native code takes
        them."""
        if isinstance(weight, QuantizedWeight):
            if weight.has_native_products:
                self.quantized[module] = weight
            weight = weight.dequantized()
        self.add_tensor(f"{module}.weight", weight)
