"""Paged attention in Triton, the backend for GPUs."""

from __future__ import annotations

import torch

from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.decode_work import DecodeWork
from promptq.worker.engine.attention.prefill_work import PrefillWork
from promptq.worker.engine.attention.types import (
    DECODE_WORK,
    PREFILL_WORK,
    LayerCache,
    Scoring,
    StepLayout,
)


class TritonPaged(AttentionBackend):
    name = "triton"
    devices = frozenset({"cuda"})
    needs = "triton"
    takes_padding = True

    def __init__(self) -> None:
        from promptq.worker.engine.attention.triton_kernels.cache import write_cache
        from promptq.worker.engine.attention.triton_kernels.decode import decode, span_list
        from promptq.worker.engine.attention.triton_kernels.prefill import prefill

        self._write_cache, self._decode, self._prefill = write_cache, decode, prefill
        self._span_list = span_list

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        layout: StepLayout,
        scoring: Scoring,
    ) -> torch.Tensor:
        key, value = _with_whole_heads(key), _with_whole_heads(value)
        self._write_cache(key, value, cache, layout)
        return self.attend_written(query, cache, layout, scoring)

    def attend_written(
        self, query: torch.Tensor, cache: LayerCache, layout: StepLayout, scoring: Scoring
    ) -> torch.Tensor:
        """Returns attention for a step whose K and V are already in the cache."""
        query = _with_whole_heads(query)
        dtype = query.dtype if cache.value.itemsize == 1 else cache.value.dtype
        output = query.new_empty(*query.shape[:2], cache.value.shape[-1], dtype=dtype)
        tables, num_decodes = layout.block_tables, layout.num_decodes
        if num_decodes:
            decodes = query[:num_decodes], output[:num_decodes]
            spans = self._span_list(scoring.pattern, query, cache)
            layout.requested.spans.add(spans)
            self._decode(*decodes, cache, tables, _decode_work(layout), spans, scoring)
        if (chunks := _prefill_work(layout)) is not None:
            self._prefill(query, output, cache, tables, chunks, scoring)
        return output


def _with_whole_heads(rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows. Copies them if the numbers of a head are not contiguous."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _decode_work(layout: StepLayout) -> DecodeWork:
    work: DecodeWork | None = layout.plans.get(DECODE_WORK)
    if work is None:
        contexts = layout.context_lens[: layout.num_decodes]
        work = DecodeWork(contexts, layout.block_tables.device, layout.lists)
        layout.plans[DECODE_WORK] = work
    return work


def _prefill_work(layout: StepLayout) -> PrefillWork | None:
    work: PrefillWork | None = layout.plans.get(PREFILL_WORK)
    if work is None and len(layout.context_lens) > layout.num_decodes:
        work = PrefillWork(layout)
        layout.plans[PREFILL_WORK] = work
    return work
