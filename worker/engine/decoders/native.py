"""Builds the native decoder from the parts of a model of the library."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from ctypes import byref, c_void_p, pointer
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.attention.types import SCALE_BYTES, LayerCache, Pattern
from promptq.worker.engine.decoders.base import Decoder
from promptq.worker.engine.decoders.expert_parts import SCORES, Expert, ExpertParts
from promptq.worker.engine.decoders.layer_parts import Attention, Layer, ModelParts
from promptq.worker.engine.decoders.mlp_parts import ACTIVATIONS, DenseMLP
from promptq.worker.engine.decoders.norm_parts import Norm, NotOfThisKindError
from promptq.worker.engine.decoders.rotation_parts import Rotation, RotationTables
from promptq.worker.engine.device.memory import give_back
from promptq.worker.engine.native import library
from promptq.worker.engine.native.build import NativeCodeError
from promptq.worker.engine.native.library import load_native
from promptq.worker.engine.quantization.modules import (
    FewBits,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
)
from promptq.worker.engine.quantization.weight import QuantizedWeight

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes in which the decoder computes."""

_FREED_BYTES = 2**26
"""Freed weights go back to the system once they have this many bytes."""

VISIBLE = {"full": 0, "sliding": 1, "chunked": 2}
"""The kinds of patterns as native/src/attention/work_pieces.h numbers them."""


class NativeDecoder(Decoder):
    """Computes packed steps in one call that releases the interpreter lock."""

    _is_packed = True
    """Whether it copies the weights into the order in which products read them."""
    _dtypes: AbstractSet[torch.dtype] = frozenset()
    """Other dtypes that weights of linear layers and embeddings may have."""

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
        """See Decoder. This decoder has its own attention and ignores the backend."""
        parts = ModelParts.of(model, len(caches))
        vocab_size, size = parts.embedding.num_embeddings, parts.embedding.embedding_dim
        if (vocab_size, size) != (parts.head.out_features, parts.head.in_features):
            raise NotOfThisKindError("it has a head of another size than its embedding")
        self._dtype = parts.norm.weight.dtype if self._is_packed else torch.float32
        self._kept: list[Any] = []  # all that the native code refers to
        self._copied: list[Any] = []  # what it copies while a layer is added
        self._max_length = max_length
        self._tables: dict[Rotation, RotationTables] = {}
        shape = library.ModelShape(
            is_bf16=self._dtype == torch.bfloat16,
            is_packed=self._is_packed,
            size=size,
            vocab_size=vocab_size,
            embedding_scale=parts.embedding_scale,
            logit_scale=parts.logit_scale,
            logit_softcap=parts.logit_softcap or 0.0,
        )
        weights = library.ModelWeights(
            embedding=self._weight(parts.embedding, keeps=self._is_packed),
            norm=self._norm(parts.norm),
            head=self._weight(parts.head),
            head_bias=self._address(parts.head.bias),
        )
        self._vocab_size, self._size = vocab_size, size
        self._native: Any = load_native()
        self._decoder = c_void_p()
        threads = torch.get_num_threads()
        self._native.decoder_new(byref(shape), byref(weights), threads, byref(self._decoder))
        freed = weakref.finalize(self, self._native.decoder_free, self._decoder)
        freed.atexit = False  # a step may still run then, on the engine's thread
        freed_bytes = 0
        for layer, cache, pattern in zip(parts.layers, caches, patterns, strict=True):
            self._add(layer, cache, pattern)
            if releases and (freed_bytes := freed_bytes + release(layer.modules)) >= _FREED_BYTES:
                give_back(parts.norm.weight.device)
                freed_bytes = 0
        self._no_rows = torch.empty(0, dtype=torch.int64)

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        return self.logits_and_states(step, rows, self._no_rows)[0]

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout = step.layout
        logits = torch.empty(len(rows), self._vocab_size, dtype=self._dtype)
        states = torch.empty(len(kept), self._size, dtype=self._dtype)
        starts, contexts = torch.tensor(layout.query_starts), torch.tensor(layout.context_lens)
        tables = layout.block_tables.contiguous()
        self._native.decoder_run(
            self._decoder,
            library.Step(
                num_rows=step.input_ids.shape[1],
                ids=step.input_ids.data_ptr(),
                positions=step.positions.data_ptr(),
                num_outputs=len(rows),
                outputs=rows.data_ptr(),
                num_kept=len(kept),
                kept=kept.data_ptr(),
                layout=library.Layout(
                    num_sequences=len(contexts),
                    max_blocks=tables.shape[1],
                    query_starts=starts.data_ptr(),
                    context_lens=contexts.data_ptr(),
                    block_tables=tables.data_ptr(),
                    write_blocks=layout.write_blocks.data_ptr(),
                    write_offsets=layout.write_offsets.data_ptr(),
                ),
                logits=logits.data_ptr(),
                states=states.data_ptr(),
            ),
        )
        return logits, states

    @classmethod
    def is_available(cls) -> bool:
        try:
            load_native()
        except NativeCodeError:
            return False
        return True

    @classmethod
    def takes(cls, weight: FewBits) -> bool:
        return isinstance(weight, QuantizedWeight) and weight.has_native_products

    def _add(self, layer: Layer, cache: LayerCache, pattern: Pattern) -> None:
        mlp = layer.mlp
        experts = self._experts(mlp) if isinstance(mlp, ExpertParts) else None
        self._native.decoder_add_layer(
            self._decoder,
            library.LayerWeights(
                before_attention=self._norm(layer.before_attention),
                after_attention=self._norm(layer.after_attention),
                before_mlp=self._norm(layer.before_mlp),
                after_mlp=self._norm(layer.after_mlp),
                is_parallel=layer.is_parallel,
                residual_scale=layer.residual_scale,
                attention=self._attention(layer.attention, cache, pattern),
                mlp=self._mlp(mlp) if isinstance(mlp, DenseMLP) else library.MlpWeights(),
                experts=None if experts is None else pointer(experts),
            ),
        )
        self._copied.clear()

    def _attention(
        self, attention: Attention, cache: LayerCache, pattern: Pattern
    ) -> library.AttentionWeights:
        query, key, value = self._weights(attention.qkv, 3)
        self._kept += [cache.key, cache.value]
        return library.AttentionWeights(
            num_heads=attention.num_heads,
            query=query,
            key=key,
            value=value,
            qkv_bias=self._bias(attention.qkv),
            query_norm=self._norm(attention.query_norm),
            key_norm=self._norm(attention.key_norm),
            norms_whole_rows=attention.norms_whole_rows,
            norms_rotated=attention.norms_rotated,
            rotation=self._rotation(attention.rotation),
            scoring=library.Scoring(
                scale=attention.scale,
                softcap=attention.softcap or 0.0,
                sinks=self._in_float32(attention.sinks),
            ),
            output=self._weight(attention.output),
            output_bias=self._bias([attention.output]),
            cache=native_cache(cache, pattern),
        )

    def _mlp(self, mlp: DenseMLP) -> library.MlpWeights:
        gate, up = self._weights(mlp.inputs, 2)
        if not mlp.is_gated:
            gate, up = up, gate
        return library.MlpWeights(
            inner_size=mlp.down.in_features,
            activation=[*ACTIVATIONS].index(mlp.activation),
            is_gated=mlp.is_gated,
            gate=gate,
            up=up,
            input_bias=self._bias(mlp.inputs),
            down=self._weight(mlp.down),
            down_bias=self._bias([mlp.down]),
        )

    def _experts(self, parts: ExpertParts) -> library.ExpertWeights:
        mlps = [self._expert(expert, parts) for expert in parts.experts()]
        if parts.shared is not None:
            mlps.append(self._mlp(parts.shared))
        routing = parts.routing
        self._read(parts)
        return library.ExpertWeights(
            routing=library.Routing(
                num_experts=routing.num_experts,
                top_k=routing.top_k,
                scores=SCORES.index(routing.scores),
                choice_bias=self._in_float32(routing.choice_bias),
                num_groups=routing.num_groups,
                top_groups=routing.top_groups,
                normalizes=routing.normalizes,
                least_sum=routing.least_sum,
                scale=routing.scale,
                jitter=routing.jitter,
            ),
            router=library.Weight(numbers=parts.router.data_ptr(), bits=32),
            router_bias=self._in_float32(parts.router_bias),
            has_shared_gate=parts.has_shared_gate,
            num_mlps=len(mlps),
            mlps=(library.MlpWeights * len(mlps))(*mlps),
        )

    def _expert(self, expert: Expert, parts: ExpertParts) -> library.MlpWeights:
        self._read(expert)
        return library.MlpWeights(
            inner_size=expert.up.shape[0],
            activation=[*ACTIVATIONS].index(parts.activation),
            is_gated=True,
            alpha=parts.limits.alpha,
            limit=parts.limits.limit,
            gate=self._weight_at(expert.gate),
            up=self._weight_at(expert.up),
            input_bias=self._address(expert.input_bias),
            down=self._weight_at(expert.down),
            down_bias=self._address(expert.down_bias),
        )

    def _read(self, weights: object) -> None:
        """Keeps weights as long as native code reads them."""
        (self._copied if self._is_packed else self._kept).append(weights)

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

    def _weights(self, linears: Sequence[nn.Linear], count: int) -> list[library.Weight]:
        """Describes the weights of linear layers, and as many empty ones that there are `count`."""
        weights = [self._weight(linear) for linear in linears]
        return weights + [library.Weight() for _ in range(count - len(weights))]

    def _bias(self, linears: Sequence[nn.Linear]) -> int | None:
        """Returns the address of the layers' biases, one after the other, if there is any. It is
        kept until the layer is added."""
        if all(linear.bias is None for linear in linears):
            return None
        biases = [
            torch.zeros(each.out_features, dtype=self._dtype) if each.bias is None else each.bias
            for each in linears
        ]
        self._copied.append(bias := torch.cat(tuple(biases)))
        return self._address(bias)

    def _weight(self, module: nn.Linear | nn.Embedding, *, keeps: bool = False) -> library.Weight:
        """Describes a weight to the native code. `keeps`: packing does not copy this weight, so the
        decoder keeps its memory."""
        weight = _weight_of(module)
        if keeps and not isinstance(weight, QuantizedWeight):
            # The model's tensor may be part of a whole file in memory.
            weight = weight.clone()
        if keeps:
            self._kept.append(weight)
        return self._weight_at(weight)

    def _weight_at(self, weight: torch.Tensor | QuantizedWeight) -> library.Weight:
        """Describes a weight, where it is. One that is packed may be copied before."""
        if isinstance(weight, QuantizedWeight):
            return native_weight(weight)
        if self._is_packed:
            self._copied.append(weight := weight.contiguous())
        if weight.dtype not in (self._dtype, *self._dtypes):
            raise NotOfThisKindError("it has weights of several dtypes")
        row_stride, column_stride = weight.stride()
        return library.Weight(
            numbers=weight.data_ptr(),
            bits=8 * weight.itemsize,
            row_stride=row_stride,
            column_stride=column_stride,
        )

    def _address(self, bias: torch.Tensor | None) -> int | None:
        """Returns the address of a bias, if there is one."""
        if bias is None:
            return None
        if bias.dtype != self._dtype or not bias.is_contiguous():
            raise NotOfThisKindError("it has biases of another dtype, or not in their order")
        return bias.data_ptr()

    def _in_float32(self, numbers: torch.Tensor | None) -> int | None:
        """Returns the address of a copy in fp32, if there are numbers, and keeps it."""
        if numbers is None:
            return None
        self._kept.append(numbers := numbers.to(torch.float32, copy=True).contiguous())
        return numbers.data_ptr()


class UnpackedDecoder(NativeDecoder):
    """Computes in fp32, slowly, and reads the weights in place, without a copy.

    They may also be in bf16, or quantized. Norms and biases are in fp32.
    """

    _is_packed = False
    _dtypes = frozenset({torch.bfloat16})


NativeDecoder.unpacked = UnpackedDecoder


def _weight_of(module: nn.Linear | nn.Embedding) -> torch.Tensor | QuantizedWeight:
    """Returns a weight [outputs, inputs], or of an embedding [tokens, hidden size]."""
    if isinstance(module, QuantizedLinear | QuantizedEmbedding):
        assert isinstance(module.quantized, QuantizedWeight), "the decoder takes no others"
        return module.quantized
    return module.weight


def native_weight(weight: QuantizedWeight) -> library.Weight:
    """Describes a quantized weight to the native code. The caller must keep the weight."""
    return library.Weight(
        numbers=weight.numbers.data_ptr(),
        scales=weight.scales.data_ptr(),
        offsets=None if weight.offsets is None else weight.offsets.data_ptr(),
        bits=weight.bits,
        group=weight.group,
    )


def native_cache(cache: LayerCache, pattern: Pattern) -> library.LayerCache:
    """Describes a layer's K and V to the native code, which continues to use their memory."""
    key, value = cache.key, cache.value
    assert key.stride() == value.stride(), "K and V are laid out alike"
    assert key.stride()[2:] == (key.shape[3], 1), "the rows of a head follow each other"
    _, num_kv_heads, block_size, row_size = key.shape
    is_int8 = key.dtype == torch.uint8
    return library.LayerCache(
        keys=key.data_ptr(),
        values=value.data_ptr(),
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_size=row_size - SCALE_BYTES if is_int8 else row_size,
        block_stride=key.stride(0) * key.itemsize,
        head_stride=key.stride(1) * key.itemsize,
        position_stride=row_size * key.itemsize,
        is_int8=is_int8,
        pattern=library.Pattern(VISIBLE[pattern.kind], pattern.size),
    )


def release(modules: Iterable[nn.Module]) -> int:
    """Frees the weights of modules, of which a native decoder has copies. The modules can no longer
    compute. Returns the number of bytes that they had."""
    num_bytes = 0
    for module in modules:
        for parameter in module.parameters(recurse=False):
            num_bytes += parameter.nbytes
            parameter.data = parameter.new_empty(0)
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            weight = cast("QuantizedWeight", module.quantized)  # the decoder takes no others
            num_bytes += sum(tensor.nbytes for tensor in weight.tensors)
            module.quantized = weight.released()
        elif isinstance(module, QuantizedExperts):
            weights = [weight for expert in module.quantized for weight in expert]
            num_bytes += sum(tensor.nbytes for weight in weights for tensor in weight.tensors)
            module.quantized = []
    return num_bytes
