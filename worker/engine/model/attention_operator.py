"""The attention that transformers' modules call (the seam, see packed_model.py), as a method of a
layer and as a torch operator. The operator is for graphs of torch.compile.

A compiled graph serves all layers of a kind, so it may contain no constant of a single layer. The
operator gets a layer's number in a tensor, which is an input of the graph like a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from promptq.shared.errors import UnsupportedModelError
from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.types import LayerCache, Pattern, Scoring, StepLayout


@dataclass(slots=True)
class SeamContext:
    """Data that all layers of a model share. The layout is set during a forward pass only."""

    backend: AttentionBackend
    layout: StepLayout | None = None
    calls: int = 0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SeamLayer:
    """The data that a layer's attention module needs in addition to the arguments of a call."""

    context: SeamContext
    cache: LayerCache
    pattern: Pattern

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention within each sequence of the step, and write K and V into the layer's
        cache. The shapes are those of `paged_attention`. Raises UnsupportedModelError outside of a
        forward pass of a PackedModel."""
        context = self.context
        if context.layout is None:
            raise UnsupportedModelError("a layer of this model was not seen by the check at load")
        context.calls += 1
        output = context.backend.attend(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self.cache,
            context.layout,
            Scoring(scale, self.pattern, softcap, sinks),
        )
        return output.unsqueeze(0)


_layers: WeakValueDictionary[int, SeamLayer] = WeakValueDictionary()
_numbers = count()


def number_of(layer: SeamLayer) -> torch.Tensor:
    """Returns a new number for the layer, as a tensor on the CPU. The operator finds the layer by
    this number, as long as the layer exists."""
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
    """Computes the attention of the layer with the number `layer`, and writes K and V to the cache.

    The operator need not declare this write. Compiled graphs read the cache only through this
    operator. The compiler cannot remove the call, because the call's output is used.
    """
    return _layers[int(layer)].attend(query, key, value, scale, softcap, sinks)


@attend.register_fake
def _(
    layer: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> torch.Tensor:
    return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
