"""Drafts with a model's own head (multi-token prediction).

The head is one more layer on the paged cache. The head's K and V are in the same blocks as the
model's K and V. The position of a row is the position of the hidden state from which the row is
computed. A row of the head also needs the next token. So the head computes the rows of one step
before the next step, and only if the head drafts.

The head decides only which tokens are drafted, so some of the head's rows may be missing. This
happens after steps without drafts, or in a cached prefix that was computed without the head. For
each block, this module counts the first rows that the head has computed. The head attends only to
rows after the last missing row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.types import LayerSpec, StepLayout
from promptq.worker.engine.core.block_manager import num_blocks_for
from promptq.worker.engine.core.drafting import UNKNOWN
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence
from promptq.worker.engine.decoders.base import Decoder
from promptq.worker.engine.decoders.head_parts import DraftStep, HeadParts
from promptq.worker.engine.decoders.native import NativeDecoder
from promptq.worker.engine.decoders.norm_parts import NotOfThisKindError
from promptq.worker.engine.device.async_copies import to_device_at_once
from promptq.worker.engine.load_check.checked_model import CheckedModel
from promptq.worker.engine.model.draft_heads import (
    HeadOfModules,
    LoadedHead,
    NoHeadError,
    head_spec,
    rotary_of,
)
from promptq.worker.engine.model.loading import LoadedModel
from promptq.worker.engine.model.packed_model import PackedModel
from promptq.worker.engine.sampling.sampler import Sampler

MOST_HELD = 512
"""The most hidden states of a sequence that one step stores for the head: those of the last rows.
The states of the oldest step are dropped if later steps have stored this many states. So a long
prompt costs little more with a head, but the head does not see the prompt's beginning."""


class DraftHead(Protocol):
    """Code that computes a model's drafting head: native code, or transformers' modules."""

    def draft(self, step: DraftStep) -> torch.Tensor:
        """Returns [length of the longest draft, S]: the tokens that the head drafts for each
        sequence. Where a sequence's draft is shorter, ignore the tokens after its end."""


@dataclass(frozen=True, slots=True)
class _Held:
    """Hidden states of a step's rows that the head has not computed yet."""

    states: torch.Tensor
    """[num_rows, hidden size]"""
    num_rows: int
    places: dict[int, tuple[int, int, int]]
    """By sequence: the position of the first row, the position after the last row, and the index of
    the first row in `states`."""


class HeadDrafts:
    """Drafts tokens for the steps of one runner, with the model's head."""

    def __init__(
        self, head: DraftHead, cache: KVCache, sampler: Sampler, device: torch.device
    ) -> None:
        """`cache` has the K and V of the head's layer."""
        self._head = head
        self._block_size = cache.block_size
        self._sampler = sampler
        self._device = device
        self._num_filled: dict[int, int] = {}
        """By block: how many of its first rows the head has computed since the model wrote them."""
        self._held: list[_Held] = []

    def draft(self, batch: Batch) -> None:
        """Draft the UNKNOWN tokens of a batch. Drops drafts for which hidden states are missing."""
        rows = []
        for share in batch.scheduled:
            if share.draft and share.draft[0] == UNKNOWN:
                if (found := self._rows(share)) is None:
                    share.draft = ()
                else:
                    rows.append(found)
        if not rows:
            return
        rows.sort(key=lambda each: len(each.share.draft), reverse=True)
        step = self._step(rows)
        drafted = self._head.draft(step).tolist()
        for index, (each, count) in enumerate(zip(rows, step.counts, strict=True)):
            each.share.draft = tuple(drafted[depth][index] for depth in range(count))
            self._fill(each)
        self._held = [held for held in self._held if held.places]

    def rows_to_keep(self, items: list[ScheduledSequence], query_starts: list[int]) -> list[int]:
        """Returns the rows of a packed step whose hidden states the head needs."""
        return [
            row
            for item, end in zip(items, query_starts[1:], strict=True)
            for row in range(end - _num_kept(item), end)
        ]

    def keep(self, items: list[ScheduledSequence], states: torch.Tensor | None) -> None:
        """Record that the model has computed these items. Stores `states`, the hidden states of the
        rows that `rows_to_keep` returned; None if the head needs no row of these items."""
        if states is None:
            # The head rests. Later, the head attends only to later rows.
            self._num_filled.clear()
            self._held.clear()
            return
        places, row = {}, 0
        for item in items:
            if self._num_filled:
                self._forget(item)
            if count := _num_kept(item):
                end = item.start + item.num_rows
                places[item.sequence.sequence_id] = end - count, end, row
                row += count
        self._held.append(_Held(states, row, places))
        while sum(held.num_rows for held in self._held[1:]) >= MOST_HELD:
            del self._held[0]

    def _forget(self, item: ScheduledSequence) -> None:
        """Record that the model overwrites an item's rows, so the head must compute them again."""
        start, size = item.start, self._block_size
        end = num_blocks_for(start + item.num_rows, size)
        for block in item.sequence.block_table[start // size : end]:
            if self._num_filled.get(block, 0) > (first := start % size):
                self._num_filled[block] = first
            start = 0  # in the blocks after the first one

    def _rows(self, share: ScheduledSequence) -> _Rows | None:
        """Returns the rows that the head must compute before a draft; None if states are lost."""
        start = end = share.start + share.num_tokens - 1  # a row needs the next token
        parts = []
        for held in reversed(self._held):
            if (place := held.places.get(share.sequence.sequence_id)) is not None:
                first, last, row = place
                if not first < start <= last:
                    break
                parts.append(held.states[row : row + start - first])  # later rows were rejected
                start = first
        table, size, first = share.sequence.block_table, self._block_size, start
        block = start // size
        if self._num_filled.get(table[block], 0) < start - block * size:
            block += 1
            start = block * size
        if start >= end:
            return None
        states = _joined(parts[::-1])[start - first :]
        while block > 0 and self._num_filled.get(table[block - 1]) == size:
            block -= 1
        return _Rows(share, start, end, block, states)

    def _step(self, rows: list[_Rows]) -> DraftStep:
        size = self._block_size
        counts = [len(each.share.draft) for each in rows]
        ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        offsets: list[int] = []
        query_starts, context_lens, tables = [0], [], []
        for each, count in zip(rows, counts, strict=True):
            sequence, span = each.share.sequence, range(each.start, each.end)
            table = sequence.block_table
            ids += sequence.token_ids[each.start + 1 : each.end + 1]
            positions += span
            blocks += [table[place // size] for place in span]
            offsets += [place % size for place in span]
            query_starts.append(len(positions))
            context_lens.append(each.end - each.first_block * size)
            tables.append(table[each.first_block : num_blocks_for(each.end + count, size)])
        width = max(map(len, tables))
        padded = [table + [0] * (width - len(table)) for table in tables]
        numbers = [ids], [positions], blocks, offsets, padded
        arrays = [np.array(each, dtype=np.int64) for each in numbers]
        inputs, places, write_blocks, write_offsets, block_tables = to_device_at_once(
            arrays, self._device
        )
        layout = StepLayout(
            num_decodes=0,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            write_blocks=write_blocks,
            write_offsets=write_offsets,
            block_size=size,
        )
        sequences = [each.share.sequence for each in rows]
        states = _joined([each.states for each in rows])
        return DraftStep(inputs, places, layout, states, sequences, counts, self._sampler)

    def _fill(self, rows: _Rows) -> None:
        """Record that the head has computed these rows."""
        table, size, end = rows.share.sequence.block_table, self._block_size, rows.end
        for index in range(rows.start // size, num_blocks_for(end, size)):
            self._num_filled[table[index]] = min(size, end - index * size)
        for held in self._held:
            held.places.pop(rows.share.sequence.sequence_id, None)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that the head computes before a draft, at the positions `start` to `end - 1`."""

    share: ScheduledSequence
    start: int
    end: int
    first_block: int
    """The index of the first of the sequence's blocks to which the head attends."""
    states: torch.Tensor


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _num_kept(item: ScheduledSequence) -> int:
    """Returns how many hidden states of an item are stored. They belong to its last rows."""
    return min(item.num_rows, MOST_HELD) if item.feeds_head else 0


def attention_of_head(
    loaded: LoadedModel, checked: CheckedModel, drafts: bool | None
) -> tuple[LoadedModel, list[LayerSpec]]:
    """If the head will draft (see LoadOptions), returns `loaded` and the specs of the head's layer.
    Otherwise returns `loaded` without the head, and an empty list. If the head cannot draft,
    `why_no_head` of the returned model has the reason."""
    if loaded.head is None:
        return loaded, []
    if drafts is None and checked.decoder is None:
        return replace(loaded, head=None), []
    if checked.mixers and checked.decoder is None:
        reason = "the library's modules compute recurrent layers"
        return replace(loaded, head=None, why_no_head=reason), []
    try:
        spec = head_spec(checked.specs)
        if checked.decoder is not None and issubclass(checked.decoder, NativeDecoder):
            _parts_of(loaded.model, loaded.head, spec)
        else:
            HeadOfModules.check(loaded.model, loaded.head.module)
    except (NoHeadError, NotOfThisKindError) as error:
        return replace(loaded, head=None, why_no_head=str(error)), []
    return loaded, [spec]


def code_of_head(
    loaded: LoadedModel, checked: CheckedModel, served: PackedModel | Decoder, cache: KVCache
) -> DraftHead:
    """Returns the code for the head of `loaded`: native code if `served` is native, otherwise
    transformers' modules. Call this only with a model that has a head after `attention_of_head`."""
    assert loaded.head is not None, "it was not dropped"
    if isinstance(served, NativeDecoder):
        parts = _parts_of(loaded.model, loaded.head, head_spec(checked.specs))
        served.add_head(parts, cache.layers[0])
        return served
    return HeadOfModules(loaded.model, loaded.head.module, cache.layers[0], checked.backend)


def _parts_of(model: PreTrainedModel, head: LoadedHead, spec: LayerSpec) -> HeadParts:
    return HeadParts.of(head.module, rotary_of(model), spec)
