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
from promptq.worker.engine.attention.types import LayerCache, Pattern
from promptq.worker.engine.decoders.head_parts import DraftStep, HeadParts
from promptq.worker.engine.quantization.modules import FewBits
from promptq.worker.engine.recurrent.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class Placement:
    """The cache and the sequences that a decoder serves."""

    caches: Sequence[LayerCache]
    """One for each layer that attends, like `patterns`."""
    patterns: Sequence[Pattern]
    backend: AttentionBackend
    """The attention backend that serves the model."""
    max_length: int
    """The most positions: each position is below this number."""
    num_slots: int = 0
    """The number of sequences for which recurrent layers have states."""
    releases: bool = False
    """Whether the decoder may free weights of the model of which it has copies."""


class Decoder(ABC):
    """Computes packed steps like PackedModel, without the library's modules."""

    unpacked: ClassVar[type[Decoder] | None] = None
    """A decoder that computes the same in fp32 without a copy of the weights, so that the check at
    load can compare the formula. None: there is no such decoder."""
    states: StatePool | None = None
    """The states of recurrent layers, if there are any."""

    @abstractmethod
    def __init__(self, model: PreTrainedModel, placement: Placement) -> None:
        """Raises NotOfThisKindError if the model has a part that the decoder does not know."""

    @abstractmethod
    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        """See PackedModel."""

    @abstractmethod
    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PackedModel."""

    def add_head(self, head: HeadParts, cache: LayerCache) -> None:
        """Adds a head that drafts, with K and V in `cache`."""
        raise NotImplementedError

    def draft(self, step: DraftStep) -> torch.Tensor:
        """Returns the tokens [most drafted, S] that the head drafts after the rows of a step. Those
        beyond a sequence's count mean nothing."""
        raise NotImplementedError

    @classmethod
    def is_available(cls) -> bool:
        """Whether this installation has the decoder's code."""
        return True

    @classmethod
    @abstractmethod
    def takes(cls, weight: FewBits) -> bool:
        """Whether the decoder multiplies with this weight without widening all of it."""

    @classmethod  # noqa: B027  # a decoder need not change them
    def arrange(cls, model: PreTrainedModel) -> None:
        """Arranges the weights of a served model as the decoder needs them, before the free memory
        for the KV cache is measured."""
