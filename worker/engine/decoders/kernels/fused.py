"""The decoder on a GPU: a layer takes few kernel launches, nine with the parts of Llama.

    hidden = scale * embed(ids)
    each layer: hidden += scale * after(o(attention(place(qkv(before(hidden))))))
                hidden += scale * after(mlp(before(hidden)))
    logits = head(norm(hidden of the sampling rows))

Norms, the attention or the MLP may be missing. A recurrent layer may replace the attention. A
recurrent layer beside attention has the same input, and both results are added. The kernel of a
norm also computes the sum before this norm, because the kernel reads the hidden state anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.attention.types import (
    PREFILL_WORK,
    LayerCache,
    LayerSpec,
    Pattern,
    Scoring,
)
from promptq.worker.engine.decoders.attention_parts import Attention
from promptq.worker.engine.decoders.base import Decoder, Placement
from promptq.worker.engine.decoders.expert_parts import ExpertParts
from promptq.worker.engine.decoders.kernels.activation import Activation
from promptq.worker.engine.decoders.kernels.experts import Experts, joined_experts
from promptq.worker.engine.decoders.kernels.fp8_product import FP8Product
from promptq.worker.engine.decoders.kernels.heads import HeadNorms, place_heads
from promptq.worker.engine.decoders.kernels.latent import FusedLatentAttention
from promptq.worker.engine.decoders.kernels.linear import Product, fused
from promptq.worker.engine.decoders.kernels.norm import add_norm, norm_columns
from promptq.worker.engine.decoders.kernels.quantized_product import QuantizedProduct
from promptq.worker.engine.decoders.kernels.recurrent import recurrent_layer
from promptq.worker.engine.decoders.kernels.sequences import StepSequences
from promptq.worker.engine.decoders.latent_parts import LatentAttention
from promptq.worker.engine.decoders.layer_parts import (
    MLP,
    Attending,
    Layer,
    ModelParts,
    Recurrent,
    specs_of_latents,
)
from promptq.worker.engine.decoders.mlp_parts import DenseMLP
from promptq.worker.engine.decoders.norm_parts import Norm, NotOfThisKindError, require
from promptq.worker.engine.decoders.rotation_parts import Rotation, RotationTables
from promptq.worker.engine.device.precision import embedding_scale
from promptq.worker.engine.quantization.fp8_weight import FP8Weight
from promptq.worker.engine.quantization.modules import FewBits, QuantizedExperts
from promptq.worker.engine.recurrent.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class _Rows:
    step: PackedStep
    sequences: StepSequences | None
    """The sequences of the step; None if there are no recurrent layers."""


_Mixer = Callable[[torch.Tensor, _Rows], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    parts: Layer
    mixers: tuple[tuple[_Mixer, float], ...]
    """The kernels of attention or recurrence, each with the factor of its result."""
    mlp: Product | None


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
        self._is_gated = parts.is_gated
        self._scoring = Scoring(parts.scale, pattern, parts.softcap, parts.sinks)
        self._row_norms: list[tuple[slice, Norm]] = []
        """Ranges of columns of Q, K and V, and for each range the norm over the whole range."""
        self._head_norms: HeadNorms | None = None
        query, key = parts.query_norm, parts.key_norm
        if query is not None and key is not None:
            if parts.norms_whole_rows:
                end = parts.num_heads * parts.head_size
                columns = slice(end), slice(end, end + parts.num_kv_heads * parts.head_size)
                self._row_norms = [*zip(columns, (query, key), strict=True)]
            else:
                self._head_norms = HeadNorms.of(query, key, follow_rotation=parts.norms_rotated)

    def __call__(self, x: torch.Tensor, rows: _Rows) -> torch.Tensor:
        qkv, step = self._qkv(x), rows.step
        for columns, norm in self._row_norms:
            norm_columns(qkv[:, columns], norm)
        placed = place_heads(
            qkv,
            step.positions[0],
            self._tables,
            self._head_norms,
            self._cache,
            step.layout,
            is_gated=self._is_gated,
        )
        attended = self._backend.attend_written(placed, self._cache, step.layout, self._scoring)
        if self._is_gated:
            _, num_heads, size = placed.shape
            with_gates = qkv[:, : 2 * num_heads * size].view(-1, num_heads, 2, size)
            attended *= with_gates[:, :, 1].sigmoid()
        return self._output(attended.flatten(1))


class _Recurrent:
    def __init__(self, recurrent: Recurrent, states: list[torch.Tensor]) -> None:
        self._layer = recurrent_layer(recurrent.parts, states)

    def __call__(self, x: torch.Tensor, rows: _Rows) -> torch.Tensor:
        assert rows.sequences is not None, "there are recurrent layers"
        return self._layer(x, rows.sequences)


def fused_mlp(parts: MLP) -> Product:
    if isinstance(parts, ExpertParts):
        return Experts(parts, None if parts.shared is None else fused_mlp(parts.shared))
    inputs, down = fused(*parts.inputs), fused(parts.down)
    activation = Activation(parts.activation, parts.is_gated)
    if parts.gate_scale == 1.0:
        return lambda x: down(activation(inputs(x)))

    def compute(x: torch.Tensor) -> torch.Tensor:
        projected = inputs(x)
        projected[:, : parts.down.in_features].mul_(parts.gate_scale)  # of the gate, or of `up`
        return down(activation(projected))

    return compute


class FusedDecoder(Decoder):
    """Computes packed steps in fused kernels, directly or captured in a CUDA graph. The parameters
    of `model` become views of the fused weights, so the model can still compute."""

    def __init__(self, model: PreTrainedModel, placement: Placement) -> None:
        backend = placement.backend
        if not isinstance(backend, TritonPaged):
            raise NotOfThisKindError(f"it attends with {backend.name}, not with Triton")
        parts = ModelParts.of(model, len(placement.caches))
        for layer in parts.layers:
            _require_kernels(layer)
        self._parts = parts
        is_scaled = embedding_scale(parts.embedding) is not None
        self._embedding_scale = 1.0 if is_scaled else parts.embedding_scale
        self._head = fused(parts.head)
        tables: dict[Rotation | None, RotationTables | None] = {None: None}
        mixers = [layer.recurrent.mixer for layer in parts.layers if layer.recurrent is not None]
        if mixers:
            self.states = StatePool(mixers, placement.num_slots, parts.norm.weight.device)
        attended = zip(placement.caches, placement.patterns, strict=True)
        states = iter(self.states.tensors if self.states else ())

        def kernels_of(part: Attending | Recurrent) -> _Mixer:
            if isinstance(part, Recurrent):
                return _Recurrent(part, next(states))
            rotation = part.rotation
            if rotation is not None and rotation not in tables:
                tables[rotation] = rotation.tables(placement.max_length, parts.norm.weight)
            if isinstance(part, Attention):
                return _Attention(part, tables[rotation], *next(attended), backend)
            latent = FusedLatentAttention(part, tables[rotation], *next(attended), backend)
            return lambda x, rows: latent(x, rows.step)

        self._layers = [
            _Layer(
                layer,
                tuple(
                    (kernels_of(part), scale)
                    for part, scale in (
                        (layer.recurrent_beside, layer.beside_scale),
                        (layer.mixer, layer.mixer_scale),
                    )
                    if part is not None
                ),
                None if layer.mlp is None else fused_mlp(layer.mlp),
            )
            for layer in parts.layers
        ]

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        last = self._last_sum(step)
        return self._scaled(self._head(self._states(last, rows)))

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        last = self._last_sum(step)
        logits = self._scaled(self._head(self._states(last, rows)))
        return logits, self._states(last, kept)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self._parts.logit_scale != 1.0:
            logits.mul_(self._parts.logit_scale)
        if cap := self._parts.logit_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _states(self, last: _Sum, rows: torch.Tensor) -> torch.Tensor:
        """Returns the final hidden states of `rows`: the norm of the sum `last`."""
        hidden, update = last.hidden.index_select(0, rows), last.update.index_select(0, rows)
        return add_norm(hidden, update, self._parts.norm, last.after, last.scale)

    def _last_sum(self, step: PackedStep) -> _Sum:
        """Returns the sum after the last layer. Its two terms are not added yet."""
        rows = _Rows(step, self._sequences(step))
        hidden = self._parts.embedding(step.input_ids[0])
        if self._embedding_scale != 1.0:
            hidden.mul_(self._embedding_scale)
        update: torch.Tensor | None = None
        after, scale = None, 1.0
        for layer in self._layers:
            parts = layer.parts
            normed = hidden
            if layer.mixers:
                normed = add_norm(hidden, update, parts.before_mixer, after, scale)
                *beside, (update, scale) = [(mix(normed, rows), by) for mix, by in layer.mixers]
                for other, by in beside:
                    add_norm(hidden, other, None, None, by)
                after = parts.after_mixer
            if layer.mlp is not None:
                inner = add_norm(hidden, update, parts.before_mlp, after, scale)
                update = layer.mlp(normed if parts.is_parallel else inner)
                after, scale = parts.after_mlp, parts.mlp_scale
        assert update is not None  # there is a layer
        if self.states is not None and step.entries is None:
            self.states.finish(step.items)
        return _Sum(hidden, update, after, scale)

    def _sequences(self, step: PackedStep) -> StepSequences | None:
        if self.states is None:
            return None
        if step.entries is None:
            return StepSequences.of(self.states.begin(step.items))
        num_rows, has_chunks = step.input_ids.shape[1], PREFILL_WORK in step.layout.plans
        return StepSequences.padded(step.entries, num_rows, has_chunks=has_chunks)

    @classmethod
    def takes(cls, weight: FewBits) -> bool:
        if isinstance(weight, FP8Weight):
            return FP8Product.takes(weight)
        return QuantizedProduct.takes(weight)

    @classmethod
    def cache_specs(cls, model: PreTrainedModel, specs: list[LayerSpec]) -> list[LayerSpec]:
        return specs_of_latents(model, specs, LatentAttention.spec)

    @classmethod
    def arrange(cls, model: PreTrainedModel) -> None:
        for layer in ModelParts.of(model).layers:
            for linears in _joined_linears(layer):
                fused(*linears)
            mlp = layer.mlp
            if isinstance(mlp, ExpertParts) and isinstance(mlp.fused, QuantizedExperts):
                joined_experts(mlp.fused)


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum that is not computed yet: `hidden + scale * after(update)` [T, hidden size]. `after` is
    a norm."""

    hidden: torch.Tensor
    update: torch.Tensor
    after: Norm | None
    scale: float


def _dense(mlp: MLP | None) -> DenseMLP | None:
    return mlp.shared if isinstance(mlp, ExpertParts) else mlp


def _joined_linears(layer: Layer) -> list[tuple[nn.Linear, ...]]:
    """Returns groups of linear layers. Each group is joined to one linear layer."""
    dense, recurrent = _dense(layer.mlp), layer.recurrent
    joined: list[tuple[nn.Linear, ...]] = []
    if isinstance(layer.mixer, Attention):
        joined.append(layer.mixer.qkv)
    elif isinstance(layer.mixer, LatentAttention):
        joined.append(layer.mixer.inputs)
    joined += [] if recurrent is None else [recurrent.parts.projections]
    return joined + ([] if dense is None else [dense.inputs])


def _require_kernels(layer: Layer) -> None:
    if isinstance(layer.mixer, Attention):
        _require_kernels_of_attention(layer.mixer)
    dense = _dense(layer.mlp)
    require(layer.experts_beside is None, "experts beside an MLP")
    require(layer.input is None, "inputs of layers beside the hidden states")
    require(layer.output_scale == 1.0, "layers that scale the hidden states")
    require(dense is None or dense.curve is None, "an activation with learned numbers")
    for linears in _joined_linears(layer):
        num_biases = sum(linear.bias is not None for linear in linears)
        require(num_biases in (0, len(linears)), "biases in some of the projections")


def _require_kernels_of_attention(attention: Attention) -> None:
    require(not attention.shares_kv, "layers that share keys and values")
    require(attention.value_norm is None, "norms of values")
    query, key = attention.query_norm, attention.key_norm
    if query is not None and key is not None and not attention.norms_whole_rows:
        formulas = {(norm.formula, norm.epsilon, norm.bias is None) for norm in (query, key)}
        require(len(formulas) == 1, "norms of queries and keys with different formulas")
