"""Describes tensors to the native code by their addresses, and keeps their memory alive."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from promptq.worker.engine.decoders.norm_parts import NotOfThisKindError
from promptq.worker.engine.native import library
from promptq.worker.engine.quantization.modules import QuantizedEmbedding, QuantizedLinear
from promptq.worker.engine.quantization.weight import QuantizedWeight
from promptq.worker.engine.recurrent.parts import RowsOfLinear


class NativeTensors:
    """Describes tensors to the native code, and keeps these tensors alive while the code may read
    them."""

    _is_packed = True
    """Whether native code makes packed copies of weights, ordered for its products."""
    _dtypes: AbstractSet[torch.dtype] = frozenset()
    """Further dtypes, besides the decoder's, that large weights may have."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype` is the dtype in which the decoder computes."""
        self._dtype = dtype
        self._kept: list[Any] = []  # all that the native code refers to
        self._copied: list[Any] = []  # for packing, until the layer is added

    def _read(self, weights: object) -> None:
        """Keep weights alive until the layer is added if native code packs them, otherwise for
        good."""
        (self._copied if self._is_packed else self._kept).append(weights)

    def _weights(self, linears: Sequence[nn.Linear], count: int) -> list[library.Weight]:
        """Returns the descriptions of the layers' weights, padded to `count` with empty ones."""
        weights = [self._weight(linear) for linear in linears]
        return weights + [library.Weight() for _ in range(count - len(weights))]

    def _bias(self, linears: Sequence[nn.Linear]) -> int | None:
        """Returns the joined biases' address, valid until the layer is added; None without bias."""
        return self._bias_of([RowsOfLinear.all_of(linear) for linear in linears])

    def _bias_of(self, parts: Sequence[RowsOfLinear]) -> int | None:
        if all(rows.linear.bias is None for rows in parts):
            return None
        biases = [
            torch.zeros(rows.count, dtype=self._dtype)
            if rows.linear.bias is None
            else rows.linear.bias[rows.first : rows.first + rows.count]
            for rows in parts
        ]
        self._copied.append(bias := torch.cat(tuple(biases)))
        return self._address(bias)

    def _weight(self, module: nn.Linear | nn.Embedding, *, keeps: bool = False) -> library.Weight:
        """Returns a weight's description. `keeps`: native code reads the weight in place."""
        weight = _weight_of(module)
        if keeps and not isinstance(weight, QuantizedWeight):
            # The model's tensor may be part of a whole file in memory.
            weight = weight.clone(memory_format=torch.contiguous_format)
        if keeps:
            self._kept.append(weight)
        return self._weight_at(weight)

    def _weight_at(self, weight: torch.Tensor | QuantizedWeight) -> library.Weight:
        """Returns a weight's description. If it will be packed, describes a contiguous copy."""
        if isinstance(weight, QuantizedWeight):
            return native_weight(weight)
        if self._is_packed:
            self._copied.append(weight := weight.contiguous())
        if weight.dtype not in (self._dtype, *self._dtypes):
            raise NotOfThisKindError("it has weights of several dtypes")
        row_stride, column_stride = weight.stride()
        return library.Weight(
            numbers=weight.data_ptr(),
            bits=8 * weight.itemsize,
            row_stride=row_stride,
            column_stride=column_stride,
        )

    def _address(self, bias: torch.Tensor | None) -> int | None:
        if bias is None:
            return None
        if bias.dtype != self._dtype or not bias.is_contiguous():
            raise NotOfThisKindError("it has biases of another dtype, or not in their order")
        return bias.data_ptr()

    def _in_float32(self, numbers: torch.Tensor | None) -> int | None:
        """Returns the address of an fp32 copy, and keeps this copy alive. None stays None."""
        if numbers is None:
            return None
        self._kept.append(numbers := numbers.to(torch.float32, copy=True).contiguous())
        return numbers.data_ptr()


def _weight_of(module: nn.Linear | nn.Embedding) -> torch.Tensor | QuantizedWeight:
    """Returns the weight: [outputs, inputs]; for an embedding [tokens, hidden size]."""
    if isinstance(module, QuantizedLinear | QuantizedEmbedding):
        assert isinstance(module.quantized, QuantizedWeight), "the decoder takes no others"
        return module.quantized
    return module.weight


def native_weight(weight: QuantizedWeight) -> library.Weight:
    """Returns the description of a quantized weight. The caller must keep the weight alive."""
    return library.Weight(
        numbers=weight.numbers.data_ptr(),
        scales=weight.scales.data_ptr(),
        offsets=None if weight.offsets is None else weight.offsets.data_ptr(),
        bits=weight.bits,
        group=weight.group,
    )
