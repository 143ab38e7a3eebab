"""Builds the native decoder from the parts of a transformers model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from ctypes import byref, c_void_p, pointer
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.attention.types import FULL, LayerCache, LayerSpec
from promptq.worker.engine.decoders.base import Decoder, Placement
from promptq.worker.engine.decoders.head_parts import DraftStep, HeadParts
from promptq.worker.engine.decoders.latent_parts import LatentAttention
from promptq.worker.engine.decoders.layer_parts import ModelParts, specs_of_latents
from promptq.worker.engine.decoders.native_weights import NativeWeights
from promptq.worker.engine.decoders.norm_parts import NotOfThisKindError
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
from promptq.worker.engine.recurrent.state_pool import StatePool

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes in which the decoder computes."""

_FREED_BYTES = 2**26
"""Freed weights are returned to the operating system each time they reach this many bytes."""


class NativeDecoder(NativeWeights, Decoder):
    """Computes a packed step in one native call, which releases Python's interpreter lock."""

    def __init__(self, model: PreTrainedModel, placement: Placement) -> None:
        """See `Decoder`. This decoder has its own attention and ignores the backend."""
        parts = ModelParts.of(model, len(placement.caches))
        vocab_size, size = parts.embedding.num_embeddings, parts.embedding.embedding_dim
        if (vocab_size, size) != (parts.head.out_features, parts.head.in_features):
            raise NotOfThisKindError("it has a head of another size than its embedding")
        dtype = parts.norm.weight.dtype if self._is_packed else torch.float32
        super().__init__(dtype, placement.max_length)
        shape = library.ModelShape(
            is_bf16=self._dtype == torch.bfloat16,
            is_packed=self._is_packed,
            size=size,
            vocab_size=vocab_size,
            embedding_scale=parts.embedding_scale,
            logit_scale=parts.logit_scale,
            logit_softcap=parts.logit_softcap or 0.0,
        )
        weights = self._describe(
            library.ModelWeights,
            parts,
            embedding=self._weight(parts.embedding, keeps=self._is_packed),
            head_bias=self._address(parts.head.bias),
        )
        if parts.inputs is not None:
            weights.inputs = pointer(self._inputs(parts.inputs, len(parts.layers)))
        self._vocab_size, self._size = vocab_size, size
        self._native: Any = load_native()
        self._decoder = c_void_p()
        threads = torch.get_num_threads()
        self._native.decoder_new(byref(shape), byref(weights), threads, byref(self._decoder))
        freed = weakref.finalize(self, self._native.decoder_free, self._decoder)
        freed.atexit = False  # a step may still run then, on the engine's thread
        recurrent = [each.recurrent for each in parts.layers]
        mixers = [each.mixer for each in recurrent if each is not None]
        num_slots = placement.num_slots
        self.states = StatePool(mixers, num_slots, torch.device("cpu")) if mixers else None
        attended = zip(placement.caches, placement.patterns, strict=True)
        states = iter(self.states.tensors if self.states else ())
        freed_bytes = 0
        for layer in parts.layers:
            weights_of_layer = self._layer(layer, attended, states)
            self._native.decoder_add_layer(self._decoder, weights_of_layer)
            self._copied.clear()
            if placement.releases:
                freed_bytes += release(layer.modules)
            if freed_bytes >= _FREED_BYTES:
                give_back(parts.norm.weight.device)
                freed_bytes = 0
        self._no_rows = torch.empty(0, dtype=torch.int64)

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        return self.logits_and_states(step, rows, self._no_rows)[0]

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.empty(len(rows), self._vocab_size, dtype=self._dtype)
        states = torch.empty(len(kept), self._size, dtype=self._dtype)
        described, memory = _described(step)
        described.num_outputs, described.outputs = len(rows), rows.data_ptr()
        described.num_kept, described.kept = len(kept), kept.data_ptr()
        described.logits, described.states = logits.data_ptr(), states.data_ptr()
        if self.states is not None:
            places = self.states.begin(step.items)
            memory.append(places)
            described.entries = library.StateEntries(
                read=places.read.data_ptr(),
                written=places.written.data_ptr(),
                num_drafted=places.num_drafted.data_ptr(),
            )
        self._native.decoder_run(self._decoder, described)
        del memory
        if self.states is not None:
            self.states.finish(step.items)
        return logits, states

    def add_head(self, head: HeadParts, cache: LayerCache) -> None:
        """Add the model's drafting head, which keeps its K and V in `cache`."""
        layer = self._layer(head.layer, iter([(cache, FULL)]), iter(()))
        weights = self._describe(library.HeadWeights, head, layer=layer)
        self._native.decoder_add_head(self._decoder, weights)
        self._copied.clear()

    def draft(self, step: DraftStep) -> torch.Tensor:
        """See `DraftHead.draft`."""
        most, num_sequences = step.counts[0], len(step.sequences)
        sequences = step.sequences * most
        num_ahead = [depth for depth in range(most) for _ in range(num_sequences)]
        uniforms = step.sampler.draws(sequences, num_ahead)[0]
        wanted = step.sampler.distributions(sequences)
        filters, counts = wanted.filters.table, np.array(step.counts, dtype=np.int64)
        states = step.states.contiguous()
        tokens = torch.empty(most, num_sequences, dtype=torch.int64)
        described, memory = _described(step)
        draft = library.Draft(
            step=described,
            states=states.data_ptr(),
            num_drafted=_address_of(counts),
            most_drafted=most,
            choice=library.Choice(
                is_sampled=wanted.is_sampled.data_ptr(),
                temperature=wanted.temperature.data_ptr(),
                filters=filters.data_ptr(),
                num_filters=filters.shape[1],
                uniforms=_address_of(uniforms),
            ),
            tokens=tokens.data_ptr(),
        )
        self._native.decoder_draft(self._decoder, draft)
        del memory
        return tokens

    @classmethod
    def is_available(cls) -> bool:
        try:
            load_native()
        except NativeCodeError:
            return False
        return True

    @classmethod
    def cache_specs(cls, model: PreTrainedModel, specs: list[LayerSpec]) -> list[LayerSpec]:
        return specs_of_latents(model, specs, LatentAttention.joined_spec)

    @classmethod
    def takes(cls, weight: FewBits) -> bool:
        return isinstance(weight, QuantizedWeight) and weight.has_native_products


class UnpackedDecoder(NativeDecoder):
    """A slow decoder that computes in fp32 and reads the weights in place, without a copy. Weights
    may be in fp32, in bf16, or quantized. Norms and biases are in fp32."""

    _is_packed = False
    _dtypes = frozenset({torch.bfloat16})


NativeDecoder.unpacked = UnpackedDecoder


def _described(step: PackedStep | DraftStep) -> tuple[library.Step, list[Any]]:
    """Returns the native description of a step, and the arrays to which the description points."""
    layout = step.layout
    num_sequences, tables = len(layout.context_lens), layout.block_tables.contiguous()
    numbers = np.array([*layout.query_starts, *layout.context_lens], dtype=np.int64)
    starts = _address_of(numbers)
    described = library.Step(
        num_rows=step.input_ids.shape[1],
        ids=step.input_ids.data_ptr(),
        positions=step.positions.data_ptr(),
        layout=library.Layout(
            num_sequences=num_sequences,
            max_blocks=tables.shape[1],
            query_starts=starts,
            context_lens=starts + (num_sequences + 1) * numbers.itemsize,
            block_tables=tables.data_ptr(),
            write_blocks=layout.write_blocks.data_ptr(),
            write_offsets=layout.write_offsets.data_ptr(),
        ),
    )
    return described, [numbers, tables]


def _address_of(array: npt.NDArray[Any]) -> int:
    """Returns the address of an array's data. `array.ctypes.data` takes ten times as long."""
    address: int = array.__array_interface__["data"][0]
    return address


def release(modules: Iterable[nn.Module]) -> int:
    """Free the weights of modules that a native decoder has copied. The modules can no longer
    compute. Returns the number of freed bytes."""
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
            num_bytes += sum(tensor.nbytes for tensor in module.weight.tensors)
            module.quantized = []
    return num_bytes
