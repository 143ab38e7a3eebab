"""The decoder on a GPU: a layer takes nine kernel launches. Its parts must be those of Llama.

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
from promptq.worker.engine.decoders.base import Decoder
from promptq.worker.engine.decoders.expert_parts import ExpertParts
from promptq.worker.engine.decoders.kernels.activation import silu_and_multiply
from promptq.worker.engine.decoders.kernels.fp8_product import FP8Product
from promptq.worker.engine.decoders.kernels.heads import place_heads
from promptq.worker.engine.decoders.kernels.linear import Product, fused
from promptq.worker.engine.decoders.kernels.norm import add_rms_norm
from promptq.worker.engine.decoders.kernels.quantized_product import QuantizedProduct
from promptq.worker.engine.decoders.layer_parts import Layer, ModelParts
from promptq.worker.engine.decoders.mlp_parts import DenseMLP
from promptq.worker.engine.decoders.norm_parts import (
    RMS_NORM,
    NotOfThisKindError,
    require,
)
from promptq.worker.engine.decoders.rotation_parts import Rotation
from promptq.worker.engine.quantization.fp8_weight import FP8Weight
from promptq.worker.engine.quantization.modules import FewBits


class _Layer:
    def __init__(self, layer: Layer, cache: LayerCache, pattern: Pattern) -> None:
        attention = layer.attention
        assert layer.before_attention is not None
        assert layer.before_mlp is not None
        self.qkv, self.gate_up = _fuse(layer)
        self.output, self.down = fused(attention.output), fused(_dense(layer).down)
        self.input_norm = layer.before_attention.weight
        self.inner_norm = layer.before_mlp.weight
        norms = [norm.weight for norm in (attention.query_norm, attention.key_norm) if norm]
        self.head_norms = torch.stack(norms) if norms else None  # [2, head size]
        self.cache = cache
        self.scoring = Scoring(attention.scale, pattern, attention.softcap, attention.sinks)


class FusedDecoder(Decoder):
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
        parts = ModelParts.of(model, len(caches))
        self._epsilon, rotation = _require_known(parts)
        self._backend = backend
        self._embedding, self._norm = parts.embedding, parts.norm.weight
        tables = rotation.tables(max_length, self._norm)
        require(not tables.is_interleaved, "a rotation of neighbours")
        self._cosine = torch.cat([tables.cosine, tables.cosine], dim=1)
        self._sine = torch.cat([tables.sine, tables.sine], dim=1)
        self._head = fused(parts.head)
        self._layers = [
            _Layer(layer, cache, pattern)
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
        for layer in ModelParts.of(model).layers:
            _fuse(layer)


def _require_known(parts: ModelParts) -> tuple[float, Rotation]:
    """Returns the epsilon of all norms, and the rotation of all layers. Raises NotOfThisKindError
    if a part is not as in Llama."""
    require(parts.embedding_scale == parts.logit_scale == 1.0, "scaled embeddings or logits")
    require(not parts.logit_softcap, "a softcap of logits")
    norms, rotations = [parts.norm], set[Rotation]()
    for layer in parts.layers:
        attention, mlp = layer.attention, _dense(layer)
        before = [norm for norm in (layer.before_attention, layer.before_mlp) if norm]
        is_known = len(before) == 2 and layer.after_attention is layer.after_mlp is None
        require(is_known, "norms elsewhere than before attention and MLP")
        norms += before + [norm for norm in (attention.query_norm, attention.key_norm) if norm]
        require(layer.residual_scale == 1.0, "a residual multiplier")
        require(not attention.norms_whole_rows, "norms across heads")
        require(not attention.norms_rotated, "norms of rotated heads")
        if attention.rotation is None:
            raise NotOfThisKindError("it has layers without rotation")
        rotations.add(attention.rotation)
        require(mlp.is_gated, "an MLP without a gate")
        require(mlp.activation == "silu", f"the activation {mlp.activation}")
        for linears in (attention.qkv, mlp.inputs):
            num_biases = sum(linear.bias is not None for linear in linears)
            require(num_biases in (0, len(linears)), "biases in some of the projections")
    for norm in norms:
        require(norm.formula == RMS_NORM and norm.bias is None, "norms other than Llama's")
    epsilons = {norm.epsilon for norm in norms}
    require(len(epsilons) == 1, "norms with different epsilons")
    require(len(rotations) == 1, "layers with different rotations")
    return epsilons.pop(), rotations.pop()


def _fuse(layer: Layer) -> tuple[Product, Product]:
    """Returns the layer's QKV, and its gate and up."""
    return fused(*layer.attention.qkv), fused(*_dense(layer).inputs)


def _dense(layer: Layer) -> DenseMLP:
    if isinstance(layer.mlp, ExpertParts):
        raise NotOfThisKindError("it has experts, for which there are no fused kernels")
    return layer.mlp
