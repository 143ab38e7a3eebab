"""What all decoders of our own offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from promptq.worker.engine.attention.backend import AttentionBackend, LayerCache, Pattern
from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.quantization.modules import FewBits


class LlamaDecoder(ABC):
    """Computes packed steps like PackedModel, without the library's modules."""

    @abstractmethod
    def __init__(
        self,
        model: PreTrainedModel,
        caches: Sequence[LayerCache],
        patterns: Sequence[Pattern],
        backend: AttentionBackend,
        max_length: int,
    ) -> None:
        """For positions below `max_length`, with a cache and a pattern for each layer.

        `backend` is the attention backend that serves the model. Raises NotOfThisKindError if the
        model has a part that the decoder does not know.
        """

    @abstractmethod
    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        """See PackedModel."""

    @abstractmethod
    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PackedModel."""

    @classmethod
    @abstractmethod
    def takes(cls, weight: FewBits) -> bool:
        """Whether it multiplies with this weight as it is."""

    @classmethod  # noqa: B027  # a decoder may take them as they are
    def arrange(cls, model: PreTrainedModel) -> None:
        """Lay the weights of a model that is served out as the decoder needs them. This is done
        before free memory is counted for the KV cache."""
