"""The types of attention over the paged KV cache: layers, steps, and keys of work lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch


@dataclass(frozen=True, slots=True)
class SpanList:
    """Key of a work list of decodes. The list depends only on this key and the contexts."""

    pattern: Pattern
    at_once: int
    """The number of spans that the device computes in parallel, each for all KV heads."""


class RequestedLists:
    """Keys of the work lists that layers requested so far. In later steps, these lists are copied
    to the device together with the step's inputs. A list that is requested for the first time is
    copied separately."""

    def __init__(self) -> None:
        self.spans: set[SpanList] = set()
        """The keys of the requested lists of decodes."""
        self._tile_sizes: defaultdict[int, set[int]] = defaultdict(set)

    def tile_sizes(self, longest_chunk: int) -> set[int]:
        """Returns the set of tile sizes that were requested for steps with a longest chunk of about
        this length. Lengths that round up to the same power of two have one set. The caller may add
        sizes to the set."""
        return self._tile_sizes[(longest_chunk - 1).bit_length()]


@dataclass(frozen=True, slots=True)
class Pattern:
    """The positions that a query sees, among the positions up to the query's position (inclusive).
    `full` means all of them, `sliding` the last `size` positions, and `chunked` the positions from
    the last multiple of `size` on."""

    kind: Literal["full", "sliding", "chunked"]
    size: int = 0

    def first_visible(self, position: int) -> int:
        """Returns the first position that a query at `position` sees."""
        if self.kind == "sliding":
            return max(0, position + 1 - self.size)
        if self.kind == "chunked":
            return position - position % self.size
        return 0

    def shortened(self, max_length: int) -> Pattern:
        """Returns the pattern for up to `max_length` tokens: FULL if `size` covers them."""
        return FULL if self.size >= max_length else self


FULL = Pattern("full")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's attention, as recorded in a forward pass of the model."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    pattern: Pattern = FULL
    shares_kv_of: int | None = None
    """The index of an earlier layer whose K and V this layer uses; None if the layer computes K and
    V."""
    scoring: frozenset[str] = frozenset()
    """Further features of the scores: `softcap`, `sinks`."""
    recorded: LayerSpec | None = None
    """The recorded layer, if the cache has latents (compressed K and V) in place of K and V."""

    @property
    def features(self) -> frozenset[str]:
        """Names of the layer's features beyond plain causal attention, such as `sliding` or
        `softcap`. `AttentionBackend.refuses` has such names."""
        return self.scoring if self.pattern.kind == "full" else self.scoring | {self.pattern.kind}

    @property
    def bytes_per_token(self) -> int:
        if self.shares_kv_of is not None:
            return 0
        key_bytes = self.key_size * self.key_dtype.itemsize
        return self.num_kv_heads * (key_bytes + self.value_size * self.value_dtype.itemsize)

    @property
    def _scale_bytes(self) -> tuple[int, int]:
        """The bytes of scales in int8 rows of K and of V. With latents, both scales are in K."""
        return (SCALE_BYTES, SCALE_BYTES) if self.value_size else (2 * SCALE_BYTES, 0)

    def in_int8(self) -> LayerSpec:
        """Returns this layer with K and V in int8: each row has integers and then a bf16 scale."""
        if self.key_dtype == torch.uint8:
            return self
        return replace(
            self,
            key_size=self.key_size + self._scale_bytes[0],
            value_size=self.value_size + self._scale_bytes[1],
            key_dtype=torch.uint8,
            value_dtype=torch.uint8,
        )

    def in_float32(self) -> LayerSpec:
        """Returns this layer with K and V in fp32."""
        of_key, of_value = self._scale_bytes if self.key_dtype == torch.uint8 else (0, 0)
        return replace(
            self,
            key_size=self.key_size - of_key,
            value_size=self.value_size - of_value,
            key_dtype=torch.float32,
            value_dtype=torch.float32,
        )

    def in_fp8(self) -> LayerSpec:
        """Returns a copy of this spec with K and V in fp8. No scales are stored."""
        return replace(self, key_dtype=torch.float8_e4m3fn, value_dtype=torch.float8_e4m3fn)


SCALE_BYTES = 2
"""Bytes of the scale of an int8 row."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's K [num_blocks, num_kv_heads, block_size, key_size] and V [..., value_size]."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scores of keys for queries: `softmax(softcap * tanh(q k scale / softcap))` in `pattern`.
    `sinks` [num_heads] are further logits in the softmax, without a value (gpt-oss)."""

    scale: float
    pattern: Pattern = FULL
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Positions of a step's T packed rows in the KV cache. All layers have the same positions.

    The first `num_decodes` rows belong to one sequence each, in descending order of context. The
    rows of the chunks follow. Sequence i has the rows from `query_starts[i]` to `query_starts[i +
    1] - 1`. After the step, the cache has K and V of `context_lens[i]` tokens of this sequence.
    """

    num_decodes: int
    query_starts: list[int]
    context_lens: list[int]
    block_tables: torch.Tensor
    """[num_sequences, max_blocks], int64. Entries after a sequence's last block mean nothing."""
    write_blocks: torch.Tensor
    """[T], int64: the block to which each row's K and V are written."""
    write_offsets: torch.Tensor
    """[T], int64: the position of each row's K and V in the row's block."""
    block_size: int
    plans: dict[Hashable, Any] = field(default_factory=dict)
    """Data that a backend computes once per step and uses in every layer."""
    lists: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    """Work lists that were copied to the device with the step's inputs. The key is a SpanList (for
    decodes) or a tile size (for chunks). In a padded step, the key is a pair of the StepKind and
    one of these."""
    requested: RequestedLists = field(default_factory=RequestedLists)
    """Keys of the work lists that the backend requested, for copies in later steps."""


DECODE_WORK = "decode work"
"""Key in `plans` of a step's DecodeWork. For CUDA graphs, StepBuffers sets it before the step."""
PREFILL_WORK = "prefill work"
"""Key in `plans` of the PrefillWork of a step's chunks."""
