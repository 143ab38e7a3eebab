"""Records each layer's LayerSpec, in a forward pass with transformers' masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from promptq.shared.errors import UnsupportedModelError
from promptq.worker.engine.attention.types import FULL, LayerSpec, Pattern
from promptq.worker.engine.model.loading import LoadedModel
from promptq.worker.engine.model.packed_model import set_attention
from promptq.worker.engine.recurrent.mixer import Mixer
from promptq.worker.engine.recurrent.recognition import unknown_memory

RECORD = "promptq_record"

WINDOWS = {"sliding_window": Pattern("sliding", 5), "attention_chunk_size": Pattern("chunked", 6)}
"""transformers' names for windows, and the small windows with which a model is recorded. The small
windows have different sizes, so that a mask shows the kind of its window."""

THRESHOLDS = {"floor_scale": 4}
"""transformers' name for the position from which Llama 4 scales queries, and the small position
with which a model is recorded."""

SCORING = {"softcap": "softcap", "sinks": "s_aux"}
"""Names in LayerSpec of features that backends may refuse, and transformers' names for them."""

HONOURED = {"scaling", "sliding_window", *SCORING.values()}
WITHOUT_EFFECT = {"is_causal", "position_ids", "position_embeddings", "cache_position"}
"""Arguments of attention functions that are already in the mask or in the tensors."""


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    arguments: dict[str, Any]


_calls: ContextVar[list[_Call]] = ContextVar("calls")


def _recording_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    _calls.get().append(_Call(module, query, key, value, attention_mask, arguments))
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(RECORD, _recording_attention)
AttentionMaskInterface.register(RECORD, eager_mask)


@contextmanager
def shrunk_windows(model: PreTrainedModel) -> Iterator[dict[Pattern, Pattern]]:
    """Context manager that shrinks a model's attention windows to a few tokens. Yields a dict from
    each small pattern to the model's pattern that it replaces."""
    config = model.config.get_text_config(decoder=True)
    true_patterns = {FULL: FULL}
    originals: list[tuple[Any, str, int]] = []
    for name, shrunk in WINDOWS.items():
        size = getattr(config, name, None)
        if isinstance(size, int) and size > 0:
            true_patterns[shrunk] = Pattern(shrunk.kind, size)
            originals.append((config, name, size))
            setattr(config, name, shrunk.size)
    for module in model.modules():
        for name, small in THRESHOLDS.items():
            if hasattr(module, name):
                originals.append((module, name, getattr(module, name)))
                setattr(module, name, small)
    try:
        yield true_patterns
    finally:
        for owner, name, size in originals:
            setattr(owner, name, size)


def record_layers(
    loaded: LoadedModel,
    token_ids: list[int],
    true_patterns: dict[Pattern, Pattern],
    mixers: list[Mixer],
) -> tuple[list[nn.Module], list[LayerSpec]]:
    """Returns the attention modules in order of call, and the spec of each. Call this in a `with`
    block of `shrunk_windows`, which yields `true_patterns`. The specs have the small windows of
    this block. `mixers` are the model's recurrent modules of known kinds.

    Raises UnsupportedModelError if a layer needs an unknown argument, makes several attention
    calls, or makes no attention call and is not one of `mixers`.
    """
    family, model = loaded.family, loaded.model
    set_attention(model, RECORD)
    calls: list[_Call] = []
    token = _calls.set(calls)
    try:
        input_ids = torch.tensor([token_ids], device=model.device)
        positions = torch.arange(len(token_ids), device=model.device).unsqueeze(0)
        model(input_ids=input_ids, position_ids=positions, use_cache=False)
    finally:
        _calls.reset(token)
    modules = [call.module for call in calls]
    num_layers = loaded.text_config.num_hidden_layers
    if len(set(modules)) != num_layers:
        known = {*modules, *(mixer.module for mixer in mixers)}
        if unknown := unknown_memory(model, known):
            raise UnsupportedModelError(
                f"{family}: {unknown} remembers earlier tokens in a way that is not known, so"
                " requests in a packed step would mix"
            )
    num_wanted = len(set(modules)) if mixers else num_layers
    if not (modules or mixers) or len(set(modules)) != num_wanted or len(calls) != num_wanted:
        raise UnsupportedModelError(
            f"{family}: {len(set(modules))} modules of a model of {num_layers} layers make "
            f"{len(calls)} attention calls; each layer must make exactly one, or requests in a "
            "packed step would mix"
        )
    specs: list[LayerSpec] = []
    for index, call in enumerate(calls):
        pattern = _pattern(family, index, call.mask)
        _check_arguments(family, index, call, true_patterns[pattern])
        earlier = (other for other in range(index) if calls[other].key is call.key)
        shared = next((other for other in earlier if calls[other].value is call.value), None)
        specs.append(
            LayerSpec(
                num_heads=call.query.shape[1],
                num_kv_heads=call.key.shape[1],
                key_size=call.key.shape[3],
                value_size=call.value.shape[3],
                key_dtype=call.key.dtype,
                value_dtype=call.value.dtype,
                pattern=pattern,
                shares_kv_of=shared,
                scoring=frozenset(
                    feature
                    for feature, name in SCORING.items()
                    if call.arguments.get(name) is not None
                ),
            )
        )
    return modules, specs


def _pattern(family: str, index: int, mask: torch.Tensor | None) -> Pattern:
    """Returns the pattern of a mask [1, 1, T, T], which is 0 or True where a key is visible."""
    if mask is None or mask.dim() != 4:
        raise UnsupportedModelError(f"{family}: layer {index} has no causal mask")
    is_bool = mask.dtype == torch.bool
    visible = mask if is_bool else mask == 0
    if not is_bool and (mask[~visible] > torch.finfo(mask.dtype).min / 2).any():
        raise UnsupportedModelError(f"{family}: layer {index} adds a bias to its scores")
    length = mask.shape[-1]
    for pattern in (FULL, *WINDOWS.values()):
        expected = torch.zeros(length, length, dtype=torch.bool)
        for position in range(length):
            expected[position, pattern.first_visible(position) : position + 1] = True
        if bool((visible == expected.to(visible.device)).all()):
            return pattern
    raise UnsupportedModelError(
        f"{family}: layer {index} sees positions that are neither causal, nor a sliding window, "
        "nor a chunk"
    )


def _check_arguments(family: str, index: int, call: _Call, pattern: Pattern) -> None:
    for name, argument in call.arguments.items():
        is_off = argument is None or (isinstance(argument, (int, float)) and not argument)
        if not is_off and name not in HONOURED and name not in WITHOUT_EFFECT:
            raise UnsupportedModelError(
                f"{family}: layer {index} calls its attention with the unknown argument {name!r}"
            )
    window = call.arguments.get("sliding_window")
    sizes = (pattern.size, WINDOWS["sliding_window"].size) if pattern.kind == "sliding" else ()
    if window and window not in sizes:
        raise UnsupportedModelError(
            f"{family}: layer {index} requests a sliding window of {window}, but its mask is"
            f" {pattern.kind} {pattern.size or ''}".rstrip()
        )
