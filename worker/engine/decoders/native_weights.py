"""Describes the parts of a model to the native code (native/src/interface.h)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure, c_double, c_int64, c_void_p, pointer
from typing import Any, TypeVar

import torch
from torch import nn

from promptq.worker.engine.attention.types import SCALE_BYTES, LayerCache, Pattern
from promptq.worker.engine.decoders.attention_parts import Attention
from promptq.worker.engine.decoders.expert_parts import SCORES, Expert, ExpertParts
from promptq.worker.engine.decoders.experts_beside import ExpertsBeside
from promptq.worker.engine.decoders.latent_parts import LatentAttention
from promptq.worker.engine.decoders.layer_inputs import LayerInput, LayerInputs
from promptq.worker.engine.decoders.layer_parts import Layer, Recurrent
from promptq.worker.engine.decoders.mlp_parts import ACTIVATIONS, DenseMLP
from promptq.worker.engine.decoders.native_tensors import NativeTensors
from promptq.worker.engine.decoders.norm_parts import Norm
from promptq.worker.engine.decoders.rotation_parts import Rotation, RotationTables
from promptq.worker.engine.native import library
from promptq.worker.engine.recurrent.parts import (
    RecurrenceParts,
    RowsOfLinear,
    ShortConvolutionParts,
)

VISIBLE = {"full": 0, "sliding": 1, "chunked": 2}
"""Codes of the pattern kinds, as in native/src/attention/work_pieces.h."""

_MOST_SHARING = 8
"""The most heads of a group that read shared blocks once (kSharingQueries in work_pieces.h)."""

_ACTIVATIONS = (*ACTIVATIONS, "limited", "xielu")
"""Names of activations, in the order of their codes in native/src/layers/activation.h."""


_Described = TypeVar("_Described", bound=Structure)


class NativeWeights(NativeTensors):
    """Describes the parts of layers to the native code."""

    def __init__(self, dtype: torch.dtype, max_length: int) -> None:
        """`dtype` is the decoder's dtype (see NativeTensors). Positions are below `max_length`."""
        super().__init__(dtype)
        self._max_length = max_length
        self._tables: dict[Rotation, RotationTables] = {}

    def _describe(self, kind: type[_Described], parts: object, **others: object) -> _Described:
        """Returns the description of `parts`. Its fields are `others`, and the attributes of the
        same names: numbers, norms, rotations, weights, and tensors, of which it has fp32 copies."""
        read: dict[type, Callable[[Any], object]] = {
            c_int64: int,
            c_double: float,
            c_void_p: self._in_float32,
            library.Norm: self._norm,
            library.Rotation: self._rotation,
            library.Weight: self._weight,
        }
        for name, of, *_ in kind._fields_:
            if name not in others and of in read:
                others[name] = read[of](getattr(parts, name))
        return kind(**others)

    def _layer(
        self,
        layer: Layer,
        attended: Iterator[tuple[LayerCache, Pattern]],
        states: Iterator[Sequence[torch.Tensor]],
    ) -> library.LayerWeights:
        """Returns a layer's description. Attention takes the next item of `attended`, a recurrent
        part the next item of `states`."""
        weights = self._describe(library.LayerWeights, layer)
        if isinstance(layer.mixer, Attention):
            weights.attention = pointer(self._attention(layer.mixer, *next(attended)))
        elif isinstance(layer.mixer, LatentAttention):
            weights.latent = pointer(self._latent(layer.mixer, *next(attended)))
        if (mixer := layer.recurrent) is None:
            pass
        elif isinstance(mixer.parts, ShortConvolutionParts):
            weights.convolution = pointer(self._convolution(mixer.parts, *next(states)))
        else:
            weights.recurrence = pointer(self._recurrence(mixer, mixer.parts, *next(states)))
        if isinstance(layer.mlp, ExpertParts):
            weights.experts = pointer(self._experts(layer.mlp))
        elif layer.mlp is not None:
            weights.mlp = pointer(self._mlp(layer.mlp))
        if layer.experts_beside is not None:
            weights.experts_beside = pointer(self._beside(layer.experts_beside))
        if layer.input is not None:
            weights.input = pointer(self._input(layer.input))
        return weights

    def _attention(
        self, attention: Attention, cache: LayerCache, pattern: Pattern
    ) -> library.AttentionWeights:
        query, key, value = self._weights(attention.qkv, 3)
        self._kept += [cache.key, cache.value]
        bias = self._bias(attention.qkv)
        if attention.is_gated:
            bias = self._bias_of(_gates_last(attention))
        return self._describe(
            library.AttentionWeights,
            attention,
            query=query,
            key=key,
            value=value,
            qkv_bias=bias,
            scoring=library.Scoring(
                scale=attention.scale,
                softcap=attention.softcap or 0.0,
                sinks=self._in_float32(attention.sinks),
            ),
            output_bias=self._bias([attention.output]),
            cache=native_cache(cache, pattern),
        )

    def _latent(
        self, parts: LatentAttention, cache: LayerCache, pattern: Pattern
    ) -> library.LatentAttentionWeights:
        query, down = parts.inputs
        queries, has_rank = parts.query_up or query, parts.query_up is not None
        rotation = self._rotation(parts.rotation)
        rotation.is_interleaved = parts.is_interleaved
        self._kept.append(cache.key)
        return self._describe(
            library.LatentAttentionWeights,
            parts,
            value_size=parts.output.in_features // parts.num_heads,
            query_rank=query.out_features if has_rank else 0,
            query_down=self._weight(query) if has_rank else library.Weight(),
            down=self._weight(down),
            input_bias=self._bias(parts.inputs if has_rank else [down]),
            query=self._weight(queries),
            query_bias=self._bias([queries]),
            rotation=rotation,
            scoring=library.Scoring(scale=parts.scale),
            output_bias=self._bias([parts.output]),
            cache=latent_cache(cache, pattern, parts.num_heads, parts.up.in_features),
        )

    def _convolution(
        self, parts: ShortConvolutionParts, windows: torch.Tensor
    ) -> library.ShortConvolutionWeights:
        return self._describe(
            library.ShortConvolutionWeights,
            parts,
            input_bias=self._bias([parts.input]),
            convolution=self._channels(parts.convolution, windows),
            output_bias=self._bias([parts.output]),
        )

    def _recurrence(
        self,
        recurrent: Recurrent,
        parts: RecurrenceParts,
        windows: torch.Tensor,
        states: torch.Tensor,
    ) -> library.RecurrenceWeights:
        inputs = [
            library.RowsOfWeight(self._weight(rows.linear), rows.first, rows.count)
            for rows in parts.inputs
        ]
        further = [[] if up is None else [up] for up in (parts.gates_up, parts.times_up)]
        gates, times = (self._weights(linears, 1)[0] for linears in further)
        self._kept.append(states)
        least_time, most_time = parts.time_limits
        return self._describe(
            library.RecurrenceWeights,
            parts,
            num_inputs=len(inputs),
            inputs=(library.RowsOfWeight * len(inputs))(*inputs),
            input_bias=self._bias_of(parts.inputs),
            gates=gates,
            times=times,
            gates_bias=self._bias(further[0]),
            times_bias=self._bias(further[1]),
            convolution=self._channels(parts.convolution, windows),
            least_time=least_time,
            most_time=most_time,
            norm=self._norm(recurrent.norm),
            norm_size=0 if parts.norm is None else parts.norm.group,
            gates_first=parts.norm is not None and parts.norm.gates_first,
            has_sigmoid=parts.norm is not None and parts.norm.is_sigmoid,
            output_bias=self._bias([parts.output]),
            states=states.data_ptr(),
        )

    def _channels(self, convolution: nn.Conv1d, windows: torch.Tensor) -> library.Convolution:
        weight = convolution.weight.squeeze(1).t()  # [size, channels]
        self._kept.append(windows)
        return library.Convolution(
            weight=self._in_float32(weight),
            bias=self._in_float32(convolution.bias),
            num_channels=weight.shape[1],
            size=weight.shape[0],
            windows=self._address(windows),
        )

    def _inputs(self, inputs: LayerInputs, num_layers: int) -> library.LayerInputsWeights:
        return self._describe(
            library.LayerInputsWeights,
            inputs,
            num_layers=num_layers,
            size=len(inputs.norm.weight),
            table=self._weight(inputs.table, keeps=self._is_packed),
        )

    def _input(self, layer: LayerInput) -> library.LayerInputWeights:
        return self._describe(
            library.LayerInputWeights,
            layer,
            size=layer.gate.out_features,
            activation=_ACTIVATIONS.index(layer.activation),
        )

    def _mlp(self, mlp: DenseMLP) -> library.MlpWeights:
        gate, up = self._weights(mlp.inputs, 2)
        if not mlp.is_gated:
            gate, up = up, gate
        return self._describe(
            library.MlpWeights,
            mlp,
            inner_size=mlp.down.in_features,
            activation=_ACTIVATIONS.index(mlp.activation),
            numbers=(c_double * 4)(*(mlp.curve or ())),
            gate=gate,
            up=up,
            input_bias=self._bias(mlp.inputs),
            down_bias=self._bias([mlp.down]),
        )

    def _experts(self, parts: ExpertParts) -> library.ExpertWeights:
        mlps = [self._expert(expert, parts) for expert in parts.experts()]
        if parts.shared is not None:
            mlps.append(self._mlp(parts.shared))
        routing = parts.routing
        self._read(parts)
        return library.ExpertWeights(
            routing=self._describe(library.Routing, routing, scores=SCORES.index(routing.scores)),
            router=library.Weight(numbers=parts.router.data_ptr(), bits=32),
            router_bias=self._in_float32(parts.router_bias),
            has_shared_gate=parts.has_shared_gate,
            num_mlps=len(mlps),
            mlps=(library.MlpWeights * len(mlps))(*mlps),
        )

    def _beside(self, beside: ExpertsBeside) -> library.ExpertsBesideWeights:
        experts = self._experts(beside.experts)
        return self._describe(library.ExpertsBesideWeights, beside, experts=experts)

    def _expert(self, expert: Expert, parts: ExpertParts) -> library.MlpWeights:
        self._read(expert)
        return library.MlpWeights(
            inner_size=expert.up.shape[0],
            activation=_ACTIVATIONS.index("limited" if parts.limits.limit else parts.activation),
            numbers=(c_double * 4)(*parts.limits),
            is_gated=parts.is_gated,
            gate_scale=1.0,
            gate=library.Weight() if expert.gate is None else self._weight_at(expert.gate),
            up=self._weight_at(expert.up),
            input_bias=self._address(expert.input_bias),
            down=self._weight_at(expert.down),
            down_bias=self._address(expert.down_bias),
        )

    def _norm(self, norm: Norm | None) -> library.Norm:
        if norm is None:
            return library.Norm()
        return library.Norm(
            weight=self._in_float32(norm.formula.factor(norm.weight)),
            bias=self._in_float32(norm.bias),
            epsilon=norm.epsilon,
            is_centered=norm.formula.is_centered,
        )

    def _rotation(self, rotation: Rotation | None) -> library.Rotation:
        if rotation is None:
            return library.Rotation()
        if rotation not in self._tables:
            like = torch.empty(1, dtype=torch.float32)
            self._tables[rotation] = rotation.tables(self._max_length, like)
        tables = self._tables[rotation]
        return library.Rotation(
            cosine=tables.cosine.data_ptr(),
            sine=tables.sine.data_ptr(),
            num_pairs=tables.cosine.shape[1],
            is_interleaved=tables.is_interleaved,
        )


def _gates_last(attention: Attention) -> list[RowsOfLinear]:
    """Returns the outputs of queries, keys, values and gates, in this order."""
    query, key, value = attention.qkv
    size = attention.head_size
    queries, gates = (
        [RowsOfLinear(query, (2 * head + part) * size, size) for head in range(attention.num_heads)]
        for part in (0, 1)
    )
    return [*queries, RowsOfLinear.all_of(key), RowsOfLinear.all_of(value), *gates]


def latent_cache(
    cache: LayerCache, pattern: Pattern, num_heads: int, rank: int
) -> library.LayerCache:
    """Returns the description of a cache whose K rows are a latent (`rank` numbers) and a rotated
    key. Threads divide the KV heads among themselves. So the description has a KV head for each
    group of heads, and all these KV heads have the same rows."""
    group = max(size for size in range(1, _MOST_SHARING + 1) if num_heads % size == 0)
    described = native_cache(LayerCache(cache.key, cache.key), pattern)
    described.num_kv_heads, described.head_stride = num_heads // group, 0
    described.value_size = rank
    if described.is_int8:
        described.head_size -= SCALE_BYTES
    return described


def native_cache(cache: LayerCache, pattern: Pattern) -> library.LayerCache:
    """Returns the description of a layer's K and V. The caller must keep their memory alive."""
    key, value = cache.key, cache.value
    assert key.stride() == value.stride(), "K and V are laid out alike"
    assert key.stride()[2:] == (key.shape[3], 1), "the rows of a head follow each other"
    _, num_kv_heads, block_size, row_size = key.shape
    is_int8 = key.dtype == torch.uint8
    head_size = row_size - SCALE_BYTES if is_int8 else row_size
    return library.LayerCache(
        keys=key.data_ptr(),
        values=value.data_ptr(),
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_size=head_size,
        value_size=head_size,
        block_stride=key.stride(0) * key.itemsize,
        head_stride=key.stride(1) * key.itemsize,
        position_stride=row_size * key.itemsize,
        is_int8=is_int8,
        pattern=library.Pattern(VISIBLE[pattern.kind], pattern.size),
    )
