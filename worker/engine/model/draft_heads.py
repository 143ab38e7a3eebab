"""Loads, from checkpoints, heads that predict further tokens (multi-token prediction).

transformers has the modules of heads (`MtpModel`), but reads heads' weights only for `generate`. A
head affects only the speed, never the output. So promptq serves a model without its head if the
head cannot be used, and no check at load tests a head's results.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.types import FULL, LayerCache, LayerSpec, StepLayout
from promptq.worker.engine.checkpoints.library_errors import LOADING_ERRORS, first_sentence
from promptq.worker.engine.decoders.head_parts import DraftStep
from promptq.worker.engine.model.attention_operator import SeamContext, SeamLayer
from promptq.worker.engine.model.packed_model import SEAM, join_seam

FULL_ATTENTION = "full_attention"
"""transformers' name for layers that attend without a window."""


class NoHeadError(Exception):
    """Raised if a model's head cannot draft. The message has the reason."""


@dataclass(frozen=True, slots=True)
class LoadedHead:
    module: nn.Module
    """An `MtpLayer` of transformers."""
    work: float
    """The work of the head for a token, as a fraction of the model's."""


def load_head(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> LoadedHead:
    """Returns the head of a model. `weights` has the head's tensors by name. Raises NoHeadError if
    the head cannot be loaded."""
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise NoHeadError("the installed transformers has no modules for it") from None
    config: Any = model.config.get_text_config(decoder=True)
    config.num_mtp_layers = 1
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if kinds and not getattr(config, f"mtp_{name}", None):
            kind = FULL_ATTENTION if FULL_ATTENTION in kinds else kinds[-1]
            setattr(config, f"mtp_{name}", [kind])
    try:
        with ExitStack() as stack:
            for each in MtpModel.get_init_context(model.dtype, False, False, None):
                stack.enter_context(each)
            heads: Any = MtpModel(model, 1)
        found, _ = convert_and_load_state_dict_in_model(
            model=heads,
            state_dict=weights,
            load_config=LoadStateDictConfig(
                weight_mapping=heads.get_weight_conversions(model),
                device_map={"": model.device},
                dtype=model.dtype,
            ),
        )
    except LOADING_ERRORS as error:
        raise NoHeadError(first_sentence(error)) from error
    head: nn.Module = heads.layers[0]
    missing = [name for name, each in head.named_parameters() if each.is_meta]
    if missing or found.mismatched_keys:
        wrong = [*missing, *map(str, found.mismatched_keys)]
        raise NoHeadError(
            f"{len(wrong)} of its weights are missing or misshaped, such as {wrong[0]}"
        )
    return LoadedHead(head.requires_grad_(False).eval(), _work(model, head))


def head_spec(specs: list[LayerSpec]) -> LayerSpec:
    """Returns the spec of a head's attention, copied from the model's last layer without a window.
    Raises NoHeadError if all layers have windows."""
    for spec in reversed(specs):
        if spec.pattern == FULL:
            return replace(spec.recorded or spec, shares_kv_of=None)
    raise NoHeadError("all of the model's layers have windows")


def rotary_of(model: PreTrainedModel) -> nn.Module | None:
    """Returns the module that computes the model's rotary embedding; None if there is no such
    module."""
    whole: Any = model  # its class is only partly typed
    return getattr(whole.get_decoder(), "rotary_emb", None)


def _work(model: PreTrainedModel, head: nn.Module) -> float:
    """Returns the number of weights that the head multiplies by a row, divided by the model's."""
    whole: Any = model
    config: Any = model.config.get_text_config(decoder=True)
    output = whole.get_output_embeddings().weight.numel()
    num_used = getattr(config, "num_experts_per_tok", None) or 0

    def used(weight: torch.Tensor) -> float:
        # Weights of convolutions have three dimensions too, but only one input.
        is_of_experts = num_used and weight.dim() == 3 and weight.shape[1] > 1
        return weight.numel() * (num_used / len(weight) if is_of_experts else 1)

    def count(modules: nn.Module) -> float:
        return float(output + sum(map(used, modules.parameters())))

    return count(head) / count(whole.get_decoder().layers)


class HeadOfModules:
    """A drafting head that computes with transformers' modules, on the paged cache."""

    def __init__(
        self, model: PreTrainedModel, head: Any, cache: LayerCache, backend: AttentionBackend
    ) -> None:
        """`head` is an `MtpLayer` that has passed `check`."""
        whole: Any = model  # its class is only partly typed
        self._head = head
        self._head.config._attn_implementation = SEAM
        self._embedding, self._output = whole.get_input_embeddings(), whole.get_output_embeddings()
        self._rotary: Any = rotary_of(model)
        self._context = SeamContext(backend)
        join_seam(head.mtp_block.self_attn, SeamLayer(self._context, cache, FULL))

    @staticmethod
    def check(model: PreTrainedModel, head: Any) -> None:
        """Raise NoHeadError if transformers' modules cannot compute the head."""
        rotary = rotary_of(model)
        if rotary is None or "layer_type" in inspect.signature(rotary.forward).parameters:
            raise NoHeadError("its layer has a rotation of another kind")
        if getattr(head.mtp_block, "self_attn", None) is None:
            raise NoHeadError("its layer does not attend")

    def draft(self, step: DraftStep) -> torch.Tensor:
        """See `DraftHead.draft`."""
        layout, states = step.layout, step.states
        ids, positions = step.input_ids, step.positions
        last = torch.tensor(step.last_rows, device=states.device)
        drafted = torch.zeros(
            step.counts[0], len(step.sequences), dtype=torch.int64, device=states.device
        )
        for depth in range(step.counts[0]):
            count = sum(each > depth for each in step.counts)
            if depth > 0:
                ids = drafted[depth - 1, :count].unsqueeze(0)
                positions = positions[:, last][:, :count] + 1
                layout = _after(step.layout, depth, count)
                last = torch.arange(count, device=states.device)
                states = states[:count]
            hidden = self._states(ids, positions, layout, states)
            states = hidden.index_select(0, last[:count])
            logits = self._output(states)
            sequences = step.sequences[:count]
            drafted[depth, :count] = step.sampler.choose(logits, sequences, [depth] * count)
            last = last[:count]
        return drafted

    def _states(
        self, ids: torch.Tensor, positions: torch.Tensor, layout: StepLayout, states: torch.Tensor
    ) -> torch.Tensor:
        """Returns the head's final hidden states [T, hidden size]."""
        embedded = self._embedding(ids)
        self._context.layout = layout
        try:
            hidden: torch.Tensor = self._head(
                embedded,
                states.unsqueeze(0),
                position_embeddings=self._rotary(embedded, position_ids=positions),
                attention_mask=None,
                position_ids=positions,
                past_key_values=None,
            )
        finally:
            self._context.layout = None
        return hidden[0]


def _after(layout: StepLayout, depth: int, count: int) -> StepLayout:
    """Returns a layout with one row for each of a step's first `count` sequences. The row is
    `depth` positions after the sequence's last row in the step."""
    places = [context + depth - 1 for context in layout.context_lens[:count]]
    tables, size = layout.block_tables[:count], layout.block_size
    of_row = torch.arange(count, device=tables.device)
    at = torch.tensor(places, device=tables.device)
    return StepLayout(
        num_decodes=0,
        query_starts=[*range(count + 1)],
        context_lens=[place + 1 for place in places],
        block_tables=tables,
        write_blocks=tables[of_row, at // size],
        write_offsets=at % size,
        block_size=size,
    )
