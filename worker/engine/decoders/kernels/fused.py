"""The decoder on a GPU: a layer takes few kernel launches, nine with the parts of Llama.

    hidden = scale * embed(ids)
    each layer: hidden += scale * after(o(attention(place(qkv(before(hidden))))))
                hidden += scale * after(mlp(before(hidden)))
    logits = head(norm(hidden of the sampling rows))

Any of the norms may be missing. The kernel of the next norm adds each sum, because it reads the
hidden state anyway.
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
from promptq.worker.engine.decoders.kernels.activation import Activation
from promptq.worker.engine.decoders.kernels.experts import Experts, joined_experts
from promptq.worker.engine.decoders.kernels.fp8_product import FP8Product
from promptq.worker.engine.decoders.kernels.heads import HeadNorms, place_heads
from promptq.worker.engine.decoders.kernels.linear import Product, fused
from promptq.worker.engine.decoders.kernels.norm import add_norm, norm_columns
from promptq.worker.engine.decoders.kernels.quantized_product import QuantizedProduct
from promptq.worker.engine.decoders.layer_parts import (
    MLP,
    Attention,
    Layer,
    ModelParts,
)
from promptq.worker.engine.decoders.mlp_parts import DenseMLP
from promptq.worker.engine.decoders.norm_parts import Norm, NotOfThisKindError, require
from promptq.worker.engine.decoders.rotation_parts import Rotation, RotationTables
from promptq.worker.engine.device.precision import embedding_scale
from promptq.worker.engine.quantization.fp8_weight import FP8Weight
from promptq.worker.engine.quantization.modules import FewBits, QuantizedExperts


class _Attention:
    def __init__(
        self,
        parts: Attention,
        tables: RotationTables | None,
        cache: LayerCache,
        pattern: Pattern,
        backend: TritonPaged,
    ) -> None:
        self._qkv, self._output = fused(*parts.qkv), fused(parts.output)
        self._tables, self._cache, self._backend = tables, cache, backend
        self._scoring = Scoring(parts.scale, pattern, parts.softcap, parts.sinks)
        self._row_norms: list[tuple[slice, Norm]] = []
        """Columns of Q, K and V that have a norm together."""
        self._head_norms: HeadNorms | None = None
        query, key = parts.query_norm, parts.key_norm
        if query is not None and key is not None:
            if parts.norms_whole_rows:
                end = parts.num_heads * parts.head_size
                columns = slice(end), slice(end, end + parts.num_kv_heads * parts.head_size)
                self._row_norms = [*zip(columns, (query, key), strict=True)]
            else:
                self._head_norms = HeadNorms.of(query, key, follow_rotation=parts.norms_rotated)

    def __call__(self, x: torch.Tensor, step: PackedStep) -> torch.Tensor:
        qkv = self._qkv(x)
        for columns, norm in self._row_norms:
            norm_columns(qkv[:, columns], norm)
        placed = place_heads(
            qkv, step.positions[0], self._tables, self._head_norms, self._cache, step.layout
        )
        attended = self._backend.attend_written(placed, self._cache, step.layout, self._scoring)
        return self._output(attended.flatten(1))


def fused_mlp(parts: MLP) -> Product:
    if isinstance(parts, ExpertParts):
        return Experts(parts, None if parts.shared is None else fused_mlp(parts.shared))
    inputs, down = fused(*parts.inputs), fused(parts.down)
    activation = Activation(parts.activation, parts.is_gated)
    return lambda x: down(activation(inputs(x)))


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
        num_slots: int = 0,
        releases: bool = False,
    ) -> None:
        if not isinstance(backend, TritonPaged):
            raise NotOfThisKindError(f"it attends with {backend.name}, not with Triton")
        parts = ModelParts.of(model, len(caches))
        known = [_attention_and_mlp(layer) for layer in parts.layers]
        self._parts = parts
        is_scaled = embedding_scale(parts.embedding) is not None
        self._embedding_scale = 1.0 if is_scaled else parts.embedding_scale
        self._head = fused(parts.head)
        tables: dict[Rotation | None, RotationTables | None] = {None: None}
        self._attentions: list[_Attention] = []
        for (attention, _), cache, pattern in zip(known, caches, patterns, strict=True):
            rotation = attention.rotation
            if rotation is not None and rotation not in tables:
                tables[rotation] = rotation.tables(max_length, parts.norm.weight)
            self._attentions.append(
                _Attention(attention, tables[rotation], cache, pattern, backend)
            )
        self._mlps: list[Product] = [fused_mlp(mlp) for _, mlp in known]

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        hidden, update = self._last_sum(step)
        return self._scaled(self._head(self._states(hidden, update, rows)))

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, update = self._last_sum(step)
        logits = self._scaled(self._head(self._states(hidden, update, rows)))
        return logits, self._states(hidden, update, kept)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self._parts.logit_scale != 1.0:
            logits.mul_(self._parts.logit_scale)
        if cap := self._parts.logit_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _states(
        self, hidden: torch.Tensor, update: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Returns the final norm of some rows of the last sum."""
        hidden, update = hidden.index_select(0, rows), update.index_select(0, rows)
        last = self._parts.layers[-1]
        return add_norm(hidden, update, self._parts.norm, last.after_mlp, last.mlp_scale)

    def _last_sum(self, step: PackedStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hidden state [T, hidden size] before the last MLP, and that MLP's output."""
        hidden = self._parts.embedding(step.input_ids[0])
        if self._embedding_scale != 1.0:
            hidden.mul_(self._embedding_scale)
        update: torch.Tensor | None = None
        after, scale = None, 1.0
        for layer, attention, mlp in zip(
            self._parts.layers, self._attentions, self._mlps, strict=True
        ):
            normed = add_norm(hidden, update, layer.before_mixer, after, scale)
            update = attention(normed, step)
            after, scale = layer.after_mixer, layer.mixer_scale
            inner = add_norm(hidden, update, layer.before_mlp, after, scale)
            update = mlp(normed if layer.is_parallel else inner)
            after, scale = layer.after_mlp, layer.mlp_scale
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
            attention, mlp = _attention_and_mlp(layer)
            fused(*attention.qkv)
            if isinstance(mlp, ExpertParts) and isinstance(mlp.fused, QuantizedExperts):
                joined_experts(mlp.fused)
            if (dense := _dense(mlp)) is not None:
                fused(*dense.inputs)


def _dense(mlp: MLP) -> DenseMLP | None:
    return mlp.shared if isinstance(mlp, ExpertParts) else mlp


def _attention_and_mlp(layer: Layer) -> tuple[Attention, MLP]:
    """Raises NotOfThisKindError if the layer has a part that these kernels do not compute."""
    if (recurrent := layer.recurrent) is not None:
        kind = recurrent.mixer.name
        raise NotOfThisKindError(f"it has recurrent layers ({kind}), without fused kernels")
    attention, mlp = layer.mixer, layer.mlp
    if not isinstance(attention, Attention) or mlp is None:
        raise NotOfThisKindError("it has layers of one part, without fused kernels")
    dense = _dense(mlp)
    require(not attention.is_gated, "gates of heads")
    require(not isinstance(mlp, ExpertParts) or mlp.is_gated, "experts without gates")
    require(dense is None or dense.gate_scale == 1.0, "an MLP that scales its gate")
    for linears in (attention.qkv, () if dense is None else dense.inputs):
        num_biases = sum(linear.bias is not None for linear in linears)
        require(num_biases in (0, len(linears)), "biases in some of the projections")
    query, key = attention.query_norm, attention.key_norm
    if query is not None and key is not None and not attention.norms_whole_rows:
        formulas = {(norm.formula, norm.epsilon, norm.bias is None) for norm in (query, key)}
        require(len(formulas) == 1, "norms of queries and keys with different formulas")
    return attention, mlp
