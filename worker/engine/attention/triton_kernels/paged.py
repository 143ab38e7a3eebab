"""Paged attention in Triton: the backend on a GPU.

Unlike the others it also takes rows that pad a step to a size that a CUDA graph was captured for:
their write block is -1 and their context 0, and they read and write nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from promptq.worker.engine.attention.triton_kernels.cache import write_cache
from promptq.worker.engine.attention.triton_kernels.decode import decode
from promptq.worker.engine.attention.triton_kernels.prefill import prefill
from promptq.worker.engine.device.async_copies import to_device

if TYPE_CHECKING:
    from promptq.worker.engine.attention.backend import LayerCache, Scoring, StepLayout

DECODE_CONTEXTS = "triton decode contexts"
"""In a layout's plans: [num_decodes], int32, on the device. Whoever replays a step for other
lengths puts a tensor of its own there."""


def triton_paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    layout: StepLayout,
    scoring: Scoring,
) -> torch.Tensor:
    """See AttentionBackend."""
    query, key, value = (_with_whole_heads(each) for each in (query, key, value))
    write_cache(key, value, cache, layout)
    output = value.new_empty(query.shape[0], query.shape[1], value.shape[2])
    num_decodes = layout.num_decodes
    if num_decodes:
        decode(
            query[:num_decodes],
            output[:num_decodes],
            cache,
            layout.block_tables,
            _decode_contexts(layout),
            max(layout.context_lens[:num_decodes]),
            scoring,
        )
    if len(layout.context_lens) > num_decodes:
        prefill(query, output, cache, layout, scoring)
    return output


def _with_whole_heads(rows: torch.Tensor) -> torch.Tensor:
    """The kernels take any strides but for a head's own elements."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _decode_contexts(layout: StepLayout) -> torch.Tensor:
    contexts: torch.Tensor | None = layout.plans.get(DECODE_CONTEXTS)
    if contexts is None:
        lengths = np.array(layout.context_lens[: layout.num_decodes], dtype=np.int32)
        contexts = to_device(lengths, layout.block_tables.device)
        layout.plans[DECODE_CONTEXTS] = contexts
    return contexts
