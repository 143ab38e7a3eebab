"""Linear layers, and how several become one without holding a weight twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Linear:
    """A linear layer: rows [T, inputs] give rows [T, outputs], in one launch."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self._weight, self._bias)


def fused(*linears: nn.Linear) -> Linear:
    """The layer that gives the outputs of all `linears`, one after the other.

    All have a bias, or none has. Their parameters become views of its own.
    """
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weight = _joined([linear.weight for linear in linears])
    return Linear(weight, _joined(biases) if biases else None)


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """All in one tensor, one after the other. They are copied only if they do not lie so yet."""
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
