"""Attention over the paged KV cache: the nouns, and what every backend says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which earlier positions a query sees, itself included.

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
        """The same for sequences of up to `max_length` tokens; often simply full."""
        return FULL if self.size >= max_length else self


FULL = Pattern("full")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's attention, as it was seen in a forward of the model."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    pattern: Pattern = FULL
    shares_kv_of: int | None = None
    """An earlier layer that hands over the very same K and V."""
    scoring: frozenset[str] = frozenset()
    """What else it asks of its scores: `softcap`, `sinks`."""

    @property
    def features(self) -> frozenset[str]:
        """What it asks for beyond plain causal attention; backends refuse by these names."""
        return self.scoring if self.pattern.kind == "full" else self.scoring | {self.pattern.kind}

    @property
    def bytes_per_token(self) -> int:
        if self.shares_kv_of is not None:
            return 0
        key_bytes = self.key_size * self.key_dtype.itemsize
        return self.num_kv_heads * (key_bytes + self.value_size * self.value_dtype.itemsize)


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
    """[num_sequences, max_blocks], int64; what lies behind a sequence's blocks means nothing."""
    write_blocks: torch.Tensor
    """[T], int64: the block that each row's K and V go to ..."""
    write_offsets: torch.Tensor
    """... and the place in it."""
    block_size: int
    plans: dict[Hashable, Any] = field(default_factory=dict)
    """What a backend works out once per step and uses in every layer."""


DECODE_CONTEXTS = "decode contexts"
"""In a layout's plans: [num_decodes], int32, on the device. Whoever replays a step for other
lengths puts a tensor of its own there."""


class AttentionBackend(ABC):
    """One way to compute attention. Making one imports what it needs; naming its class does not."""

    name: ClassVar[str]
    """What `--attention` calls it."""
    devices: ClassVar[Set[str]]
    """Types of devices, as torch names them."""
    dtypes: ClassVar[Set[torch.dtype]] = {torch.float32, torch.bfloat16, torch.float16}
    needs: ClassVar[str] = ""
    """A package that not every installation has."""
    takes_padding: ClassVar[bool] = False
    """Whether decodes may be padded to the size of a CUDA graph: rows whose write block is -1 and
    whose context, by DECODE_CONTEXTS, is 0, which read and write nothing."""
    refuses: ClassVar[Set[str]] = frozenset()
    """Of LayerSpec.features, what it does not know."""

    def why_not(self, specs: Sequence[LayerSpec]) -> str:
        """Why it does not serve a model of these layers; empty if it does."""
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
        [T, num_kv_heads, value_size] give [T, num_heads, value_size]. What the cache holds
        outside of the sequences, NaN included, changes nothing.
        """
