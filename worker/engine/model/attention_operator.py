"""The seam's attention as one operator, which torch.compile puts into its graphs unchanged.

A compiled graph serves all layers of a kind, so nothing of one layer may be a constant in it.
A number in a tensor, an input of the graph like a weight, tells the operator which layer it is.
"""

from __future__ import annotations

from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch


class Attending(Protocol):
    """One layer's attention. The shapes are those of `paged_attention`."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[1, T, num_heads, value_size]; writes K and V into the layer's cache."""
        ...


_layers: WeakValueDictionary[int, Attending] = WeakValueDictionary()
_numbers = count()


def number_of(layer: Attending) -> torch.Tensor:
    """Returns the number by which the operator finds the layer while it lives; on the CPU."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


@torch.library.custom_op("promptq::attend", mutates_args=())
def attend(
    layer: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The attention of the layer with this number. Its writes to the cache need not be declared:
    no graph reads the cache otherwise, and the call is kept in place because its output is used."""
    return _layers[int(layer)].attend(query, key, value, scale, softcap, sinks)


@attend.register_fake
def _(
    layer: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
