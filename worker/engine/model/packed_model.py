"""Connects transformers' models to the paged KV cache through one attention function, the seam.

A model that uses this function builds no mask, because transformers makes masks only for functions
with a registered mask function. Each attention module has an attribute with its layer's cache, so
the function needs only the module that calls it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from promptq.shared.errors import UnsupportedModelError
from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.attention.types import LayerCache, Pattern
from promptq.worker.engine.model.attention_operator import SeamContext, SeamLayer, attend, number_of
from promptq.worker.engine.recurrent.mixer import Mixer
from promptq.worker.engine.recurrent.rows import RecurrentRows
from promptq.worker.engine.recurrent.state_pool import StatePool

SEAM = "promptq"
_ATTRIBUTE = "promptq_layer"
_NUMBER = "promptq_number"
"""The name of a module's attribute with the layer's number, for compiled graphs."""


class RowStarts:
    """Takes the place of transformers' cache in families that count positions from the cache.

    These families compute a row's position as its index plus the length of the cache. So the
    "length" here is a tensor [T] that makes each sum the row's true position. K and V pass through
    unchanged. The masks are the same as without a cache.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        count = torch.arange(positions.shape[1], device=positions.device)
        self._starts = positions[0] - count

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        return self._starts

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


class PackedModel:
    """A transformers model whose attention modules, in order of call, use `caches`.

    `mixers` compute the model's recurrent modules, with states for `num_slots` sequences. Set
    `counts_rows` for families that compute positions from the length of transformers' cache: the
    model then gets RowStarts in place of this cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Sequence[nn.Module],
        caches: Sequence[LayerCache],
        patterns: Sequence[Pattern],
        backend: AttentionBackend,
        *,
        counts_rows: bool = False,
        mixers: Sequence[Mixer] = (),
        num_slots: int = 0,
    ) -> None:
        self._model = model
        self._context = SeamContext(backend)
        self._counts_rows = counts_rows
        self._modules = modules
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        for module, cache, pattern in zip(modules, caches, patterns, strict=True):
            join_seam(module, SeamLayer(self._context, cache, pattern))
        self.states = StatePool(mixers, num_slots, model.device) if mixers else None
        self._rows: RecurrentRows | None = None  # during a forward pass only
        self._num_calls = len(modules) + len(mixers)
        for mixer, tensors in zip(mixers, self.states.tensors if self.states else (), strict=True):
            mixer.module.forward = partial(self._mix, mixer, tensors)
        set_attention(model, SEAM)

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        """Returns the logits [len(rows), vocab_size] of `rows`. Writes K and V of all rows of
        the step."""
        return self._forward(step, rows)

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits of `rows`, and the final hidden states [len(kept), hidden size] of the
        rows `kept`. Raises UnsupportedModelError if the family returns no `last_hidden_state`."""
        states_of_kept: list[torch.Tensor] = []

        def keep(body: nn.Module, arguments: Any, output: Any) -> None:
            states = getattr(output, "last_hidden_state", None)
            if states is not None:
                states_of_kept.append(states[0].index_select(0, kept))

        hook = _body(self._model).register_forward_hook(keep)
        try:
            logits = self._forward(step, rows)
        finally:
            hook.remove()
        if not states_of_kept:
            raise UnsupportedModelError(
                f"{self._model.config.model_type}: does not return its final hidden states"
            )
        return logits, states_of_kept[-1]

    def _forward(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        context = self._context
        if self.states is not None:
            self._rows = self.states.begin(step.items)
        context.layout, context.calls = step.layout, 0
        further: dict[str, Any] = {}
        if self._keeps_rows:
            further["logits_to_keep"] = rows
        if self._counts_rows:
            further["past_key_values"] = RowStarts(step.positions)
        # Compiled graphs need a view whose strides follow from its shape.
        positions = step.positions[0].unsqueeze(0)
        try:
            output = self._model(
                input_ids=step.input_ids, position_ids=positions, use_cache=False, **further
            )
        finally:
            context.layout = self._rows = None
        if context.calls != self._num_calls:
            raise UnsupportedModelError(
                f"{self._model.config.model_type}: {context.calls} calls in a forward of "
                f"{self._num_calls} attending or recurrent layers"
            )
        if self.states is not None:
            self.states.finish(step.items)
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_rows else logits[rows]

    def _mix(
        self,
        mixer: Mixer,
        tensors: Sequence[torch.Tensor],
        hidden_states: torch.Tensor,
        *_: Any,
        **others: Any,
    ) -> torch.Tensor:
        """Compute a recurrent layer, in place of the `forward` of its module."""
        if self._rows is None:
            raise UnsupportedModelError("a recurrent layer computes outside of a packed step")
        self._context.calls += 1
        return mixer.mix(hidden_states[0], self._rows, tensors).unsqueeze(0)

    def decoder_layers(self) -> list[nn.Module]:
        """Returns the decoder layers: the modules with attention in the outermost ModuleLists."""
        attending = set(self._modules)

        def within(module: nn.Module) -> Iterator[nn.Module]:
            for child in module.children():
                if attending.isdisjoint(child.modules()):
                    continue
                if isinstance(module, nn.ModuleList):
                    yield child
                else:
                    yield from within(child)

        return list(within(self._model))


def _body(model: Any) -> nn.Module:
    """Returns the part of the model that ends with the final norm. Some families never call their
    `base_model`, and `get_decoder` of some others returns the whole model."""
    decoder: nn.Module = model.get_decoder()
    return getattr(model, "model", decoder) if decoder is model else decoder


def join_seam(module: nn.Module, layer: SeamLayer) -> None:
    """Set the attributes by which an attention module finds its layer's cache."""
    setattr(module, _ATTRIBUTE, layer)
    setattr(module, _NUMBER, number_of(layer))


def leave_seam(modules: Sequence[nn.Module], mixers: Sequence[Mixer] = ()) -> None:
    """Remove a PackedModel's attributes from the modules, so that the caches can be freed."""
    for module in modules:
        for name in (_ATTRIBUTE, _NUMBER):
            vars(module).pop(name, None)
    for mixer in mixers:
        vars(mixer.module).pop("forward", None)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the model's attention function. Raises UnsupportedModelError if the model ignores this
    setting."""
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise UnsupportedModelError(
            f"{model.config.model_type}: its attention cannot be replaced: {error}"
        ) from error
    if model.config.get_text_config(decoder=True)._attn_implementation != name:
        raise UnsupportedModelError(
            f"{model.config.model_type}: its attention cannot be replaced, because the family has "
            "its own code for it"
        )


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within each sequence of the packed step.

    `query` is [1, num_heads, T, key_size], `key` and `value` are [1, num_kv_heads, T, ...]. Returns
    [1, T, num_heads, value_size]. If a model passes other arguments that have an effect, the check
    at load has refused the model.
    """
    layer: SeamLayer | None = getattr(module, _ATTRIBUTE, None)
    if layer is None:
        raise UnsupportedModelError(f"{type(module).__name__}: was not seen by the check at load")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__}: computes its own mask or bias")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        number = getattr(module, _NUMBER)
        return attend(number, query, key, value, scale, softcap, s_aux), None
    return layer.attend(query, key, value, scale, softcap, s_aux), None


AttentionInterface.register(SEAM, paged_attention)
