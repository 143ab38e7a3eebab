"""What the check at load found of a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.types import LayerSpec
from promptq.worker.engine.decoders.base import LlamaDecoder
from promptq.worker.engine.model.backend_choice import TURNED_OFF
from promptq.worker.engine.model.packed_model import PackedModel


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check of a model found that a decoder of our own serves. Another load of the same
    files on the same device need not find it anew."""

    specs: list[LayerSpec]
    backend: str
    decoder: str


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """What the check found: the attention modules in order of call, and what each asks for."""

    modules: list[nn.Module]
    specs: list[LayerSpec]
    backend: AttentionBackend
    counts_rows: bool = False
    """See PackedModel."""
    decoder: type[LlamaDecoder] | None = None
    """Our own decoder that serves the model; None: the library's modules do."""
    why_no_own_code: str = TURNED_OFF
    """Why no decoder of our own serves the model; empty if one does."""

    @property
    def is_known(self) -> bool:
        """Whether an earlier load checked it."""
        return not self.modules

    @property
    def verdict(self) -> Verdict | None:
        """None if the library's modules compute: they have to be recorded each time."""
        if self.decoder is None:
            return None
        return Verdict(self.specs, self.backend.name, self.decoder.__name__)

    def on(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        max_length: int,
        max_position: int | None = None,
        *,
        releases: bool = False,
    ) -> PackedModel | LlamaDecoder:
        """The model on this cache, for sequences of up to `max_length` tokens.

        `releases`: nobody else needs the weights any more, so those that are packed are freed.
        """
        patterns = [spec.pattern.shortened(max_length) for spec in self.specs]
        if self.decoder is not None:
            last = max_position or max_length
            return self.decoder(
                model, cache.layers, patterns, self.backend, last, releases=releases
            )
        return PackedModel(
            model, self.modules, cache.layers, patterns, self.backend, counts_rows=self.counts_rows
        )
