"""The weights of a checkpoint that another tool quantized."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from promptq.worker.engine.quantization.modules import SavedWeight
from promptq.worker.engine.quantization.weight import ExpertsWeight


@dataclass(slots=True)
class SavedWeights:
    """The weights of a quantized checkpoint, in the format of the files or dequantized."""

    format: str
    """Name of the format, such as `gptq`; empty if no weight is quantized."""
    dtype: torch.dtype
    """The dtype in which the model computes."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """All parameters by name, in `dtype`. A quantized parameter takes no memory until `widen`."""
    quantized: dict[str, SavedWeight] = field(default_factory=dict)
    """The quantized weights, by the names of modules."""

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Add a parameter that is not quantized."""
        self.tensors[name] = tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def add(self, module: str, weight: SavedWeight | torch.Tensor) -> None:
        """Add the weight of a linear layer, an embedding or a layer's experts."""
        if isinstance(weight, torch.Tensor):
            self.add_tensor(f"{module}.weight", weight)
            return
        self.quantized[module] = weight
        for name, shape in shapes_of(module, weight).items():
            self.tensors[name] = torch.zeros(1, dtype=self.dtype).expand(shape)

    def widen(self, module: str) -> None:
        """Replace the placeholders of a module's parameters by its dequantized weight."""
        weight = self.quantized[module]
        if isinstance(weight, ExpertsWeight):
            for part, numbers in weight.dequantized().items():
                self.add_tensor(f"{module}.{part}", numbers)
        else:
            self.add_tensor(f"{module}.weight", weight.dequantized())


def shapes_of(module: str, weight: SavedWeight) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a module's quantized parameters, by name."""
    if isinstance(weight, ExpertsWeight):
        return {f"{module}.{part}": shape for part, shape in weight.shapes.items()}
    return {f"{module}.weight": weight.shape}
