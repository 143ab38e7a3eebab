"""The results of the check at load."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.types import LayerSpec
from promptq.worker.engine.decoders.base import Decoder, Placement
from promptq.worker.engine.model.backend_choice import TURNED_OFF
from promptq.worker.engine.model.packed_model import PackedModel, leave_seam
from promptq.worker.engine.recurrent.mixer import Mixer


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check that a decoder of promptq has passed. A later load of the same files on
    the same device does not repeat the check."""

    specs: list[LayerSpec]
    backend: str
    decoder: str


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """The choices with which a model has passed the check: attention backend, decoder, and layers'
    specs."""

    modules: list[nn.Module]
    """The attention modules in order of call; empty for a model that an earlier load checked."""
    specs: list[LayerSpec]
    """The attention of each layer."""
    backend: AttentionBackend
    counts_rows: bool = False
    """See `PackedModel`."""
    mixers: tuple[Mixer, ...] = ()
    """The recurrent modules of the model."""
    decoder: type[Decoder] | None = None
    """The decoder of promptq that serves the model; None if transformers' modules serve it."""
    why_no_own_code: str = TURNED_OFF
    """The reason why none of promptq's decoders serves the model; empty if a decoder serves it."""
    is_known: bool = False
    """Whether an earlier load checked the model."""

    @property
    def takes_padding(self) -> bool:
        """Whether steps may be padded to the size of a CUDA graph. Padding rows have no states, so
        transformers' modules cannot pad steps of recurrent layers."""
        return self.backend.takes_padding and (self.decoder is not None or not self.mixers)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict for later loads of the model. None if transformers' modules serve the model,
        because then each load must record the attention modules again."""
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
        num_slots: int = 0,
        releases: bool = False,
    ) -> PackedModel | Decoder:
        """Returns the model, ready to serve `num_slots` sequences of up to `max_length` tokens with
        the KV cache `cache`.

        `max_position` is the number of positions, by default `max_length`. With `releases`, the
        decoder frees the weights that it packs, so no other code may need these weights.
        """
        patterns = [spec.pattern.shortened(max_length) for spec in self.specs]
        if self.decoder is not None:
            last = max_position or max_length
            placement = Placement(
                cache.layers, patterns, self.backend, last, num_slots=num_slots, releases=releases
            )
            return self.decoder(model, placement)
        return PackedModel(
            model,
            self.modules,
            cache.layers,
            patterns,
            self.backend,
            counts_rows=self.counts_rows,
            mixers=self.mixers,
            num_slots=num_slots,
        )

    def leave(self) -> None:
        """Disconnect the modules from the last PackedModel, to free its cache and states."""
        leave_seam(self.modules, self.mixers)
