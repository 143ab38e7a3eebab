"""Joins several linear layers into one, without keeping a second copy of their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import nn

from promptq.worker.engine.decoders.kernels.fp8_product import FP8Product
from promptq.worker.engine.decoders.kernels.quantized_product import QuantizedProduct
from promptq.worker.engine.quantization.fp8_weight import FP8Weight
from promptq.worker.engine.quantization.modules import FewBits, QuantizedLinear

Weight = TypeVar("Weight", bound=FewBits)
Product = Callable[[torch.Tensor], torch.Tensor]
"""A function that computes rows [T, outputs] from rows [T, inputs]."""


def fused(*linears: nn.Linear) -> Product:
    """Returns one linear layer with the outputs of all `linears`, one after the other.

    Either all `linears` must have a bias, or none. The weights become views of one joined weight.
    Weights of several kinds cannot be joined. Then the result computes each weight in a separate
    kernel launch.
    """
    quantized = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    kinds = {linear.quantized.kind for linear in quantized}
    if 0 < len(quantized) < len(linears) or len(kinds) > 1:
        parts = [fused(linear) for linear in linears]
        return lambda rows: torch.cat([part(rows) for part in parts], dim=1)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = _joined(biases) if biases else None
    if not quantized:
        weight = _joined([linear.weight for linear in linears])
        return lambda rows: nn.functional.linear(rows, weight, bias)
    joined = joined_weights([linear.quantized for linear in quantized])
    if isinstance(joined, FP8Weight):
        return FP8Product(joined, bias)
    return QuantizedProduct(joined, bias)


def joined_weights(weights: Sequence[Weight]) -> Weight:
    """Returns one weight with the outputs of all `weights`, one after the other. `weights` must be
    of one kind, and become views of the result."""
    first: Any = weights[0]
    joined = {
        field.name: _joined([getattr(each, field.name) for each in weights])
        for field in fields(first)
        if isinstance(getattr(first, field.name), torch.Tensor)
    }
    whole: Weight = replace(first, **joined)
    return whole


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns one tensor with all parameters, in order. Copies them unless they are adjacent."""
    first = parameters[0].data
    num_rows = sum(len(each) for each in parameters)
    if not _are_adjacent(parameters):
        first = torch.cat([each.data for each in parameters])
        start = 0
        for each in parameters:
            each.data = first[start : start + len(each)]
            start += len(each)
    return first.as_strided((num_rows, *first.shape[1:]), first.stride())


def _are_adjacent(parameters: Sequence[torch.Tensor]) -> bool:
    end = parameters[0].data_ptr()
    for each in parameters:
        if not each.is_contiguous() or each.data_ptr() != end:
            return False
        end += each.numel() * each.element_size()
    return len({each.untyped_storage().data_ptr() for each in parameters}) == 1
