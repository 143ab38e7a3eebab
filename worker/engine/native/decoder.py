"""Builds the native decoder from a model of the library whose layers are of the Llama kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.attention.backend import AttentionBackend, LayerCache, Pattern
from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.llama.decoder import LlamaDecoder
from promptq.worker.engine.llama.parts import LlamaLayer, LlamaParts

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of weights that it can compute with."""

VISIBLE = {"full": 0, "sliding": 1, "chunked": 2}
"""The kinds of patterns as native/src/attention/work_pieces.h numbers them."""


class NativeDecoder(LlamaDecoder):
    """Computes packed steps in one call that releases the interpreter lock."""

    def __init__(
        self,
        model: PreTrainedModel,
        caches: Sequence[LayerCache],
        patterns: Sequence[Pattern],
        backend: AttentionBackend,
        max_length: int,
    ) -> None:
        """See LlamaDecoder. It has its own attention, so it does not use the backend."""
        parts = LlamaParts.of(model, len(caches))
        cosine, sine = parts.rotations(max_length, torch.empty(1, dtype=torch.float32))
        self._decoder: Any = torch.classes.promptq.Decoder(
            parts.embedding,
            cosine,
            sine,
            parts.norm,
            parts.head,
            parts.num_heads,
            parts.num_kv_heads,
            parts.head_size,
            parts.epsilon,
            parts.scale,
        )
        self._no_rows = torch.empty(0, dtype=torch.int64)
        for layer, cache, pattern in zip(parts.layers, caches, patterns, strict=True):
            self._add(layer, cache, pattern)

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        return self.logits_and_states(step, rows, self._no_rows)[0]

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout = step.layout
        results: tuple[torch.Tensor, torch.Tensor] = self._decoder.logits_and_states(
            step.input_ids[0],
            step.positions[0],
            rows,
            kept,
            torch.tensor(layout.query_starts),
            torch.tensor(layout.context_lens),
            layout.block_tables,
            layout.write_blocks,
            layout.write_offsets,
        )
        return results

    def _add(self, layer: LlamaLayer, cache: LayerCache, pattern: Pattern) -> None:
        projections = (layer.query, layer.key, layer.value)
        weights: list[torch.Tensor] = [linear.weight for linear in projections]
        biases: list[torch.Tensor] = [each.bias for each in projections if each.bias is not None]
        self._decoder.add_layer(
            layer.input_norm,
            torch.cat(weights),
            torch.cat(biases) if biases else None,
            layer.query_norm,
            layer.key_norm,
            layer.output.weight,
            layer.output.bias,
            layer.inner_norm,
            layer.gate.weight,
            layer.up.weight,
            layer.down.weight,
            cache.key,
            cache.value,
            VISIBLE[pattern.kind],
            pattern.size,
        )


def release_weights(model: PreTrainedModel) -> None:
    """Free the weights that a native decoder of this model has copied, so that each is held once.

    The model itself cannot compute any more.
    """
    whole: Any = model
    embedding = whole.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not embedding.weight:
            # A new parameter, because the decoder may hold the old one.
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
