"""The parts of a drafting head, and the inputs of its step.

The head predicts one token further than the model (multi-token prediction, DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.2). The head has two inputs for each position: the
model's final hidden state, and the token of the next position. With the model's `embedding` and
`output_layer`, the head computes

    hidden = projection(norm(embedding(token)), norm(hidden))
    hidden = norm(layer(hidden))
    logits = output_layer(hidden)

For the next draft, the head's hidden state takes the place of the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from promptq.worker.engine.attention.types import LayerSpec, StepLayout
from promptq.worker.engine.core.sequence import Sequence
from promptq.worker.engine.decoders.layer_parts import Attending, Layer, layer_of
from promptq.worker.engine.decoders.norm_parts import Norm, require
from promptq.worker.engine.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class HeadParts:
    """The parts of a drafting head. The head uses the model's embedding and output layer."""

    of_embedding: Norm
    of_state: Norm
    projection: nn.Linear
    """Computes the layer's input from the normalised embedding, followed by the normalised hidden
    state."""
    layer: Layer
    last: Norm

    @classmethod
    def of(cls, head: Any, rotary: nn.Module | None, spec: LayerSpec) -> HeadParts:
        """Returns the parts of a transformers `MtpLayer`. Raises NotOfThisKindError for an unknown
        part, or if K and V have other sizes than in `spec`."""
        require(head.post_norm is not None, "a head without a final norm")
        is_swapped = getattr(head.config, "mtp_hidden_states_first", False)
        require(not is_swapped, "a head whose hidden states come first")
        require(head.eh_proj.bias is None, "a head whose projection has a bias")
        layer = layer_of(head.mtp_block, rotary, {})
        fits = isinstance(layer.mixer, Attending) and (
            layer.mixer.cache_shape == (spec.num_kv_heads, spec.in_float32().key_size)
        )
        require(fits, "a head with other attention than the model's")
        require(layer.input is None, "a head whose layer has inputs beside its hidden states")
        return cls(
            of_embedding=Norm.of(head.enorm),
            of_state=Norm.of(head.hnorm),
            projection=head.eh_proj,
            layer=layer,
            last=Norm.of(head.post_norm),
        )


@dataclass(frozen=True, slots=True)
class DraftStep:
    """The input of a drafting head: T rows of S sequences, the sequences with most drafts first.

    The last row of a sequence drafts the first token. Each further drafted token takes one more
    row, in addition to T. The block tables have blocks for K and V of these rows.
    """

    input_ids: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    layout: StepLayout
    states: torch.Tensor  # [T, hidden size]
    sequences: list[Sequence]
    counts: list[int]
    """Number of tokens to draft for each sequence, at least 1, in descending order."""
    sampler: Sampler
    """Draws each token with the random number that the model will use at this position."""

    @property
    def last_rows(self) -> list[int]:
        """The index of the last row of each sequence."""
        return [end - 1 for end in self.layout.query_starts[1:]]
