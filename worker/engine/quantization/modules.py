"""Modules of a model whose weights are quantized.

They compute with the numbers that the weights stand for, in fp32 and without rounding inputs, so
that code of our own can be compared with them. They are too slow to serve.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.quantization.weight import QuantizedWeight


class QuantizedLinear(nn.Linear):
    """A linear layer. Its parameter `weight` is empty."""

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None) -> None:
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, bias=bias is not None, device="meta")
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        if bias is not None:
            self.bias = bias
        self.quantized = weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        y = nn.functional.linear(input.float(), self.quantized.dequantized(), bias)
        return y.to(input.dtype)


class QuantizedEmbedding(nn.Embedding):
    """An embedding, which gives numbers of `dtype`. Its parameter `weight` is empty."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__(*weight.shape, device="meta")
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.quantized = weight
        self._dtype = dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.quantized.dequantized(input).to(self._dtype)


def quantize_model(
    model: PreTrainedModel, bits: int, group: int | None, *, embeddings: bool
) -> None:
    """Round the weights of all linear layers, and free what they were rounded from.

    With `embeddings`, the embedding and the output layer are rounded to 8 bits. Otherwise they stay
    as they are.
    """
    whole: Any = model  # its class is only partly typed
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            quantized = QuantizedWeight.of(module.weight, bits, group)
            model.set_submodule(name, QuantizedLinear(quantized, module.bias))
    if not embeddings:
        return
    is_tied = head.weight is embedding.weight
    of_head = QuantizedWeight.of(head.weight, 8)
    of_embedding = of_head if is_tied else QuantizedWeight.of(embedding.weight, 8)
    whole.set_input_embeddings(QuantizedEmbedding(of_embedding, model.dtype))
    whole.set_output_embeddings(QuantizedLinear(of_head, head.bias))
