"""Linear layers, and how several become one without holding a weight twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from promptq.worker.engine.decoders.kernels.fp8_product import FP8Product
from promptq.worker.engine.decoders.kernels.quantized_product import QuantizedProduct
from promptq.worker.engine.quantization.fp8_weight import FP8Weight
from promptq.worker.engine.quantization.modules import FewBits, QuantizedLinear

Product = Callable[[torch.Tensor], torch.Tensor]
"""Computes rows [T, outputs] from rows [T, inputs]."""


class Linear:
    """A linear layer, in one launch."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self._weight, self._bias)


class SideBySide:
    """The outputs of several layers, one after the other: a launch for each, and one more."""

    def __init__(self, parts: Sequence[Product]) -> None:
        self._parts = parts

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(rows) for part in self._parts], dim=1)


def fused(*linears: nn.Linear) -> Product:
    """Returns one layer with the outputs of all `linears`, one after the other.

    All have a bias, or none has. Their weights become views of its weight, unless they are of
    several kinds.
    """
    biases = [linear.bias for linear in linears if linear.bias is not None]
    quantized = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    if not quantized:
        weight = _joined([linear.weight for linear in linears])
        return Linear(weight, _joined(biases) if biases else None)
    kinds = {linear.quantized.kind for linear in quantized}
    if len(quantized) < len(linears) or len(kinds) > 1:
        return SideBySide([fused(linear) for linear in linears])
    bias = _joined(biases) if biases else None
    first: Any = quantized[0].quantized
    joined = {
        field.name: _joined([getattr(each.quantized, field.name) for each in quantized])
        for field in fields(first)
        if isinstance(getattr(first, field.name), torch.Tensor)
    }
    return _product(replace(first, **joined), bias)


def _product(weight: FewBits, bias: torch.Tensor | None) -> Product:
    if isinstance(weight, FP8Weight):
        return FP8Product(weight, bias)
    return QuantizedProduct(weight, bias)


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns all in one tensor, one after the other. Copies them only if they lie elsewhere."""
    first = parameters[0].data
    num_rows = sum(len(each) for each in parameters)
    if not _lie_together(parameters):
        first = torch.cat([each.data for each in parameters])
        start = 0
        for each in parameters:
            each.data = first[start : start + len(each)]
            start += len(each)
    return first.as_strided((num_rows, *first.shape[1:]), first.stride())


def _lie_together(parameters: Sequence[torch.Tensor]) -> bool:
    end = parameters[0].data_ptr()
    for each in parameters:
        if not each.is_contiguous() or each.data_ptr() != end:
            return False
        end += each.numel() * each.element_size()
    return len({each.untyped_storage().data_ptr() for each in parameters}) == 1
