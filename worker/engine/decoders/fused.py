"""The decoder on a GPU: a layer of the Llama kind takes nine kernel launches.

    hidden = embed(ids)
    each layer: hidden += o(attention(qkv(norm(hidden))))
                hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
    logits = head(norm(hidden of the sampling rows))

The kernel of the next norm adds each sum, because it reads the hidden state anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.attention.types import LayerCache, Pattern, Scoring
from promptq.worker.engine.decoders.base import LlamaDecoder
from promptq.worker.engine.decoders.kernels.activation import silu_and_multiply
from promptq.worker.engine.decoders.kernels.fp8_product import FP8Product
from promptq.worker.engine.decoders.kernels.heads import place_heads
from promptq.worker.engine.decoders.kernels.linear import Product, fused
from promptq.worker.engine.decoders.kernels.norm import add_rms_norm
from promptq.worker.engine.decoders.kernels.quantized_product import QuantizedProduct
from promptq.worker.engine.decoders.llama_parts import LlamaLayer, LlamaParts, NotOfThisKindError
from promptq.worker.engine.quantization.fp8_weight import FP8Weight
from promptq.worker.engine.quantization.modules import FewBits


class _Layer:
    def __init__(self, layer: LlamaLayer, cache: LayerCache, scoring: Scoring) -> None:
        self.qkv, self.gate_up = _fuse(layer)
        self.output, self.down = fused(layer.output), fused(layer.down)
        self.input_norm, self.inner_norm = layer.input_norm, layer.inner_norm
        norms = [norm for norm in (layer.query_norm, layer.key_norm) if norm is not None]
        self.head_norms = torch.stack(norms) if norms else None  # [2, head size]
        self.cache, self.scoring = cache, scoring


class FusedDecoder(LlamaDecoder):
    """Computes packed steps in fused kernels, directly or captured in a CUDA graph.

    The parameters of `model` become views of the fused weights, so the model can still compute.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        caches: Sequence[LayerCache],
        patterns: Sequence[Pattern],
        backend: AttentionBackend,
        max_length: int,
        *,
        releases: bool = False,
    ) -> None:
        if not isinstance(backend, TritonPaged):
            raise NotOfThisKindError(f"it attends with {backend.name}, not with Triton")
        parts = LlamaParts.of(model, len(caches))
        self._backend = backend
        self._embedding, self._norm = parts.embedding, parts.norm
        self._head = fused(parts.head)
        self._epsilon = parts.epsilon
        self._cosine, self._sine = parts.rotations(max_length, parts.norm)
        self._layers = [
            _Layer(layer, cache, Scoring(parts.scale, pattern))
            for layer, cache, pattern in zip(parts.layers, caches, patterns, strict=True)
        ]

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        hidden, update = self._last_sum(step)
        return self._head(self._states(hidden, update, rows))

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, update = self._last_sum(step)
        logits = self._head(self._states(hidden, update, rows))
        return logits, self._states(hidden, update, kept)

    def _states(
        self, hidden: torch.Tensor, update: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Returns the final norm of some rows of the last sum."""
        hidden, update = hidden.index_select(0, rows), update.index_select(0, rows)
        return add_rms_norm(hidden, update, self._norm, self._epsilon)

    def _last_sum(self, step: PackedStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns two terms [T, hidden size], whose sum is the output of the last layer."""
        layout, positions, epsilon = step.layout, step.positions[0], self._epsilon
        hidden = self._embedding(step.input_ids[0])
        update: torch.Tensor | None = None
        for layer in self._layers:
            normed = add_rms_norm(hidden, update, layer.input_norm, epsilon)
            query = place_heads(
                layer.qkv(normed),
                positions,
                self._cosine,
                self._sine,
                layer.head_norms,
                epsilon,
                layer.cache,
                layout,
            )
            attended = self._backend.attend_written(query, layer.cache, layout, layer.scoring)
            update = layer.output(attended.flatten(1))
            normed = add_rms_norm(hidden, update, layer.inner_norm, epsilon)
            update = layer.down(silu_and_multiply(layer.gate_up(normed)))
        assert update is not None  # there is a layer
        return hidden, update

    @classmethod
    def takes(cls, weight: FewBits) -> bool:
        if isinstance(weight, FP8Weight):
            return FP8Product.takes(weight)
        return QuantizedProduct.takes(weight)

    @classmethod
    def arrange(cls, model: PreTrainedModel) -> None:
        for layer in LlamaParts.of(model).layers:
            _fuse(layer)


def _fuse(layer: LlamaLayer) -> tuple[Product, Product]:
    """Returns the layer's QKV, and its gate and up."""
    return fused(layer.query, layer.key, layer.value), fused(layer.gate, layer.up)
