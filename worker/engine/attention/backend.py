"""The interface of every attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from typing import ClassVar

import torch

from promptq.worker.engine.attention.types import LayerCache, LayerSpec, Scoring, StepLayout


class AttentionBackend(ABC):
    """An implementation of attention. The constructor imports the packages that it needs."""

    name: ClassVar[str]
    """The backend's name in `--attention`."""
    devices: ClassVar[Set[str]]
    """The types of devices that the backend runs on, as torch names them."""
    dtypes: ClassVar[Set[torch.dtype]] = {torch.float32, torch.bfloat16, torch.float16}
    needs: ClassVar[str] = ""
    """An optional package that the backend needs; empty if it needs none."""
    takes_padding: ClassVar[bool] = False
    """Whether a step may be padded with rows to the size of a CUDA graph (see StepBuffers). A
    padding row has the write block -1 and, in DECODE_WORK, a context of 0. For such a row, the
    backend must read no K and V, and output zeros. In a padded step, only the work lists in `plans`
    (DECODE_WORK, PREFILL_WORK) show which rows are decodes and which are chunks. The layout's
    `num_decodes`, `query_starts` and `context_lens` have no meaning in a padded step."""
    refuses: ClassVar[Set[str]] = frozenset()
    """The names in LayerSpec.features that the backend does not support."""

    def why_not(self, specs: Sequence[LayerSpec]) -> str:
        """Returns why the backend cannot serve a model with these layers; empty if it can."""
        for spec in specs:
            for dtype in (spec.key_dtype, spec.value_dtype):
                if dtype not in self.dtypes:
                    return f"it does not compute in {dtype}"
            if unknown := spec.features & self.refuses:
                return f"it does not support {', '.join(sorted(unknown))}"
        return ""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        layout: StepLayout,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Write a step's K and V into the cache, and return the attention of its queries.

        `query` is [T, num_heads, key_size], `key` [T, num_kv_heads, key_size], `value` [T,
        num_kv_heads, value_size]. Returns [T, num_heads, value_size]. Cache content outside of the
        sequences, even NaN, does not change the result.
        """
