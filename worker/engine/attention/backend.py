"""The types for attention over the paged KV cache, and the interface of every backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from promptq.worker.engine.attention.work_lists import AskedLists


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which positions a query sees, up to and including its own.

    `full`: all; `sliding`: the last `size`; `chunked`: those since the last multiple of `size`.
    """

    kind: Literal["full", "sliding", "chunked"]
    size: int = 0

    def first_visible(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        if self.kind == "sliding":
            return max(0, position + 1 - self.size)
        if self.kind == "chunked":
            return position - position % self.size
        return 0

    def shortened(self, max_length: int) -> Pattern:
        """The same for sequences of up to `max_length` tokens. It is full if `size` covers them."""
        return FULL if self.size >= max_length else self


FULL = Pattern("full")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's attention, as recorded in a forward of the model."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    pattern: Pattern = FULL
    shares_kv_of: int | None = None
    """The index of an earlier layer whose K and V this layer uses."""
    scoring: frozenset[str] = frozenset()
    """Further features of its scores: `softcap`, `sinks`."""

    @property
    def features(self) -> frozenset[str]:
        """The features beyond plain causal attention. Backends refuse features by these names."""
        return self.scoring if self.pattern.kind == "full" else self.scoring | {self.pattern.kind}

    @property
    def bytes_per_token(self) -> int:
        if self.shares_kv_of is not None:
            return 0
        key_bytes = self.key_size * self.key_dtype.itemsize
        return self.num_kv_heads * (key_bytes + self.value_size * self.value_dtype.itemsize)

    def in_int8(self) -> LayerSpec:
        """The same with K and V in int8: a row has its integers, and then their scale in bf16."""
        if self.key_dtype == torch.uint8:
            return self
        return replace(
            self,
            key_size=self.key_size + SCALE_BYTES,
            value_size=self.value_size + SCALE_BYTES,
            key_dtype=torch.uint8,
            value_dtype=torch.uint8,
        )

    def in_float32(self) -> LayerSpec:
        """The same with K and V in fp32, whatever they are in."""
        scale_bytes = SCALE_BYTES if self.key_dtype == torch.uint8 else 0
        return replace(
            self,
            key_size=self.key_size - scale_bytes,
            value_size=self.value_size - scale_bytes,
            key_dtype=torch.float32,
            value_dtype=torch.float32,
        )

    def in_fp8(self) -> LayerSpec:
        """The same with K and V in fp8, without a scale."""
        return replace(self, key_dtype=torch.float8_e4m3fn, value_dtype=torch.float8_e4m3fn)


SCALE_BYTES = 2
"""What the scale of a row in int8 takes."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's K [num_blocks, num_kv_heads, block_size, key_size], and V likewise."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """How queries score keys: `softmax(softcap * tanh(q k scale / softcap))` within `pattern`.

    `sinks` [num_heads] are further logits in the softmax that carry no value (gpt-oss).
    """

    scale: float
    pattern: Pattern = FULL
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where a step's T packed rows lie in the cache; the same for all layers.

    The first `num_decodes` rows belong to one sequence each, in descending order of context, and
    the rows of the chunks follow. Sequence i has the rows `query_starts[i]` up to
    `query_starts[i + 1]`, and after the step its K and V are `context_lens[i]` long.
    """

    num_decodes: int
    query_starts: list[int]
    context_lens: list[int]
    block_tables: torch.Tensor
    """[num_sequences, max_blocks], int64. Entries after a sequence's last block mean nothing."""
    write_blocks: torch.Tensor
    """[T], int64: the block that each row's K and V are written to."""
    write_offsets: torch.Tensor
    """[T], int64: the place in that block."""
    block_size: int
    plans: dict[Hashable, Any] = field(default_factory=dict)
    """What a backend computes once per step and uses in every layer."""
    lists: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    """The work lists that came with the step's inputs: of decodes by their SpanList, and of chunks
    by the size of their tiles. Those of a padded step have keys (kind, one of these)."""
    asked: AskedLists = field(default_factory=AskedLists)
    """Where a backend notes which lists it asks for."""


DECODE_WORK = "decode work"
"""The key in a layout's plans for the DecodeWork of its decodes. Code that replays a step with
other lengths puts its own there."""
PREFILL_WORK = "prefill work"
"""The same for the PrefillWork of its chunks."""


class AttentionBackend(ABC):
    """One way to compute attention. Creating an instance imports the packages that it needs."""

    name: ClassVar[str]
    """Its name in `--attention`."""
    devices: ClassVar[Set[str]]
    """The types of devices it runs on, as torch names them."""
    dtypes: ClassVar[Set[torch.dtype]] = {torch.float32, torch.bfloat16, torch.float16}
    needs: ClassVar[str] = ""
    """A package that it needs and that may not be installed."""
    takes_padding: ClassVar[bool] = False
    """Whether steps may be padded to the size of a CUDA graph (see StepBuffers). A padding row has
    the write block -1 and, in DECODE_WORK, the context 0. It reads nothing, and its output is
    zero. The lists in `plans` (DECODE_WORK, PREFILL_WORK) say which rows are decodes and which
    belong to chunks. The layout's `num_decodes`, `query_starts` and `context_lens` mean nothing in
    such a step."""
    refuses: ClassVar[Set[str]] = frozenset()
    """The names in LayerSpec.features that it does not know."""

    def why_not(self, specs: Sequence[LayerSpec]) -> str:
        """Why it cannot serve a model with these layers; empty if it can."""
        for spec in specs:
            for dtype in (spec.key_dtype, spec.value_dtype):
                if dtype not in self.dtypes:
                    return f"it does not compute in {dtype}"
            if unknown := spec.features & self.refuses:
                return f"it does not know {', '.join(sorted(unknown))}"
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
        """Write the step's K and V into the cache, then attend through the block tables.

        `query` [T, num_heads, key_size], `key` [T, num_kv_heads, key_size] and `value`
        [T, num_kv_heads, value_size] give [T, num_heads, value_size]. Cache content outside of the
        sequences, even NaN, does not change the result.
        """
