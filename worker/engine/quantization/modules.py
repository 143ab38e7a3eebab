"""Modules with quantized weights, which replace modules of a transformers model.

Modules with quantized weights compute with the dequantized weights, in fp32 and without rounding
inputs. So promptq's decoders can be compared with these modules. The modules are too slow for
serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.device.expert_weights import (
    ExpertWeights,
    expert_weights,
    has_experts,
    input_weights,
    sum_of_experts,
)
from promptq.worker.engine.device.precision import embedding_scale, product
from promptq.worker.engine.quantization.fp8_weight import FP8Weight
from promptq.worker.engine.quantization.weight import ExpertsWeight, ExpertWeight, QuantizedWeight

FewBits = QuantizedWeight | FP8Weight
SavedWeight = FewBits | ExpertsWeight


class QuantizedLinear(nn.Linear):
    """A linear layer with quantized weights, in a model of `dtype`. The tensor `weight` is
    empty."""

    def __init__(self, weight: FewBits, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, bias=bias is not None, device="meta")
        self.weight = _empty_parameter(weight, dtype)
        if bias is not None:
            self.bias = bias
        self.quantized: FewBits = weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = product(
            input,
            self.out_features,
            self.bias,
            lambda rows: self.quantized.rows(rows).dequantized(),
        )
        return y.to(input.dtype)


class QuantizedEmbedding(nn.Embedding):
    """An embedding with quantized weights. The tensor `weight` is empty, but has the dtype of
    outputs."""

    def __init__(self, weight: FewBits, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__(*weight.shape, device="meta")
        self.weight = _empty_parameter(weight, dtype)
        self.quantized: FewBits = weight
        self.scalar_embed_scale = scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.quantized.rows(input).dequantized().to(self.weight.dtype)
        return rows if self.scalar_embed_scale is None else _scaled(rows, self.scalar_embed_scale)


class _ScaledEmbedding(nn.Embedding):
    def __init__(self, num_rows: int, size: int, scale: float) -> None:
        super().__init__(num_rows, size, device="meta")
        self.scalar_embed_scale = scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _scaled(super().forward(input), self.scalar_embed_scale)


def _scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    return rows * torch.tensor(scale, dtype=rows.dtype, device=rows.device)


class QuantizedExperts(nn.Module):
    """The experts of a layer, with quantized weights."""

    plain: Any
    """The transformers module, whose weights were freed."""
    quantized: list[ExpertWeight]

    def __init__(self, plain: nn.Module, weight: ExpertsWeight) -> None:
        """Free the weights of `plain`, a transformers module, and use `weight` instead."""
        super().__init__()
        self.plain = plain
        self.quantized = weight.experts
        for parameter in (input_weights(plain), self.plain.down_proj):
            parameter.data = parameter.new_empty(0)

    @classmethod
    def rounded(cls, plain: Any, bits: int, group: int | None) -> QuantizedExperts:
        """Returns the experts of `plain` with rounded weights. Frees the weights of `plain`."""
        rounded = partial(QuantizedWeight.of, bits=bits, group=group)
        experts = []
        for index in range(len(plain.down_proj)):
            gate, up, down = expert_weights(plain, index)
            of_gate = None if gate is None else rounded(gate)
            experts.append((of_gate, rounded(up), rounded(down)))
        return cls(plain, ExpertsWeight(experts))

    @property
    def weight(self) -> ExpertsWeight:
        return ExpertsWeight(self.quantized)

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        total = sum_of_experts(self.plain, hidden, chosen, shares, self._dequantized)
        return total.to(hidden.dtype)

    def _dequantized(self, index: int) -> ExpertWeights:
        gate, up, down = self.quantized[index]
        of_gate = None if gate is None else gate.dequantized()
        return ExpertWeights(of_gate, up.dequantized(), down.dequantized())


def _empty_parameter(weight: FewBits, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(weight.scales.new_empty(0, dtype=dtype), requires_grad=False)


def quantize_model(
    model: PreTrainedModel,
    bits: int | None = None,
    group: int | None = None,
    *,
    embeddings: bool = False,
    saved: Mapping[str, SavedWeight] | None = None,
) -> None:
    """Replace linear layers and experts by quantized ones, and free their weights.

    `saved` maps module names to quantized weights. If `bits` is not None, the weights of all other
    linear layers and experts are rounded to `bits`. `group` is the number of inputs that share a
    scale; None: one scale for each output. With `embeddings`, embeddings and the output layer are
    rounded too, to 8 bits. Raises NativeError if a weight cannot be rounded.
    """
    saved = saved or {}
    whole: Any = model  # its class is only partly typed
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
    dtype = model.dtype
    names = {module: name for name, module in model.named_modules()}
    bits_of_ends = 8 if bits is not None and embeddings else None

    def quantized(module: nn.Linear | nn.Embedding, bits: int | None) -> FewBits | None:
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            return None
        weight = saved.get(names[module])
        assert not isinstance(weight, ExpertsWeight), "it has the name of experts"
        if weight is None and bits is not None:
            weight = QuantizedWeight.of(module.weight, bits, group if bits == 4 else None)
        return None if weight is None else weight.to(module.weight.device)

    for module, name in names.items():
        is_inner = type(module) is nn.Linear and module is not head
        is_inner = is_inner and not name.endswith((".router.proj", ".gate.wg"))  # must stay exact
        scale = embedding_scale(module)
        if is_inner and (weight := quantized(module, bits)) is not None:
            model.set_submodule(name, QuantizedLinear(weight, module.bias, dtype))
        elif isinstance(of_experts := saved.get(name), ExpertsWeight):
            model.set_submodule(name, QuantizedExperts(module, of_experts))
        elif bits is not None and has_experts(module):
            rounded = QuantizedExperts.rounded(module, bits, group if bits == 4 else None)
            model.set_submodule(name, rounded)
        elif module is not embedding and scale is not None and bits_of_ends is not None:
            of_table = QuantizedWeight.of(cast("nn.Embedding", module).weight, bits_of_ends)
            model.set_submodule(name, QuantizedEmbedding(of_table, dtype, scale))
    is_tied = head.weight is embedding.weight
    of_embedding = quantized(embedding, bits_of_ends)
    of_head = of_embedding if is_tied else quantized(head, bits_of_ends)
    if of_embedding is not None:
        scale = embedding_scale(embedding)
        whole.set_input_embeddings(QuantizedEmbedding(of_embedding, dtype, scale))
    if of_head is not None:
        whole.set_output_embeddings(QuantizedLinear(of_head, head.bias, dtype))


def move_quantized(model: PreTrainedModel, device: torch.device) -> None:
    """Move the quantized weights of a model to a device, because `Module.to` does not move them."""
    moved: dict[int, FewBits] = {}  # tied weights only once
    for module in model.modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            weight = module.quantized
            if id(weight) not in moved:
                moved[id(weight)] = weight.to(device)
            module.quantized = moved[id(weight)]
        elif isinstance(module, QuantizedExperts):
            module.quantized = [
                (None if gate is None else gate.to(device), up.to(device), down.to(device))
                for gate, up, down in module.quantized
            ]


def with_plain_modules(model: PreTrainedModel) -> None:
    """Replace quantized modules by plain modules with dequantized weights."""
    whole: Any = model
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
    linears = [name for name, each in model.named_modules() if isinstance(each, QuantizedLinear)]
    for name in linears:
        if (module := model.get_submodule(name)) is not head:
            linear = cast("QuantizedLinear", module)
            model.set_submodule(name, _plain_linear(linear, _plain_weight(linear)))
    experts = [
        (name, each) for name, each in model.named_modules() if isinstance(each, QuantizedExperts)
    ]
    for name, quantized in experts:
        for part, weight in quantized.weight.dequantized().items():
            getattr(quantized.plain, part).data = weight.to(model.dtype)
        model.set_submodule(name, quantized.plain)
    if isinstance(embedding, QuantizedEmbedding):
        shape, scale = embedding.quantized.shape, embedding_scale(embedding)
        plain = (
            nn.Embedding(*shape, device="meta")
            if scale is None
            else _ScaledEmbedding(*shape, scale)
        )
        plain.weight = _plain_weight(embedding)
        whole.set_input_embeddings(plain)
    if isinstance(head, QuantizedLinear):
        is_tied = getattr(embedding, "quantized", None) is head.quantized
        weight = whole.get_input_embeddings().weight if is_tied else _plain_weight(head)
        whole.set_output_embeddings(_plain_linear(head, weight))


def _plain_linear(module: QuantizedLinear, weight: nn.Parameter) -> nn.Linear:
    outputs, inputs = module.quantized.shape
    plain = nn.Linear(inputs, outputs, bias=module.bias is not None, device="meta")
    plain.weight, plain.bias = weight, module.bias
    return plain


def _plain_weight(module: QuantizedLinear | QuantizedEmbedding) -> nn.Parameter:
    return nn.Parameter(module.quantized.dequantized().to(module.weight.dtype), requires_grad=False)
