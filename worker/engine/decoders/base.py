"""The interface of promptq's decoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.attention.types import LayerCache, LayerSpec, Pattern
from promptq.worker.engine.quantization.modules import FewBits
from promptq.worker.engine.recurrent.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class Placement:
    """The KV cache, the attention backend and the limits with which a decoder is created."""

    caches: Sequence[LayerCache]
    """The cache of each layer that has attention, in order. `patterns` has the same order."""
    patterns: Sequence[Pattern]
    backend: AttentionBackend
    """The attention backend that serves the model."""
    max_length: int
    """The number of positions: each position is below this number."""
    num_slots: int = 0
    """The number of places in the batch for which recurrent layers have states."""
    releases: bool = False
    """Whether the decoder may free weights of the model that it has copied."""


class Decoder(ABC):
    """Computes packed steps like PackedModel, but without transformers' modules."""

    unpacked: ClassVar[type[Decoder] | None] = None
    """The decoder class that the check at load tests in place of this class: the same formula in
    fp32, without copies of weights. None if there is no such class."""
    states: StatePool | None = None
    """The states of recurrent layers; None if the model has no recurrent layers."""

    @abstractmethod
    def __init__(self, model: PreTrainedModel, placement: Placement) -> None:
        """Raises NotOfThisKindError if the model has a part that the decoder does not support."""

    @abstractmethod
    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        """See `PackedModel.logits`."""

    @abstractmethod
    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PackedModel.logits_and_states`."""

    @classmethod
    def is_available(cls) -> bool:
        """Whether this installation has the decoder's code."""
        return True

    @classmethod
    @abstractmethod
    def takes(cls, weight: FewBits) -> bool:
        """Whether the decoder can multiply by this weight without a whole dequantized copy."""

    @classmethod
    def cache_specs(cls, model: PreTrainedModel, specs: list[LayerSpec]) -> list[LayerSpec]:
        """Returns the specs of the layers of this decoder's KV cache.

        `specs` describe the attention layers as transformers computes them. A decoder that stores K
        and V in another form returns other specs.
        """
        return specs

    @classmethod  # noqa: B027  # a decoder need not change them
    def arrange(cls, model: PreTrainedModel) -> None:
        """Arrange the weights of a served model as the decoder needs them. Call this before the
        free memory for the KV cache is measured."""
