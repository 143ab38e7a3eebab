"""Random cases of paged attention with their exact results, and random weights of few bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch

from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.types import LayerCache, Pattern, Scoring, StepLayout
from promptq.worker.engine.core.block_manager import num_blocks_for
from promptq.worker.engine.quantization.fp8_weight import FP8Weight
from promptq.worker.engine.quantization.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer's heads and their sizes, and the tokens of a block."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    block_size: int = 16
    is_latent: bool = False
    """Whether K continues the numbers of V, as in latent attention. Queries then have both."""

    @property
    def query_size(self) -> int:
        return self.key_size + (self.value_size if self.is_latent else 0)


class Case:
    """A step of random sequences. All other cells of the cache are NaN.

    `step` lists each sequence's context after the step, and its number of rows in the step. Decodes
    come first, in descending order of context, then chunks of prompts. `shared` has, for a
    sequence, the earlier sequence that has the same first blocks, and the number of shared
    positions. The cache keeps K and V in the dtype `kept`, without rounding.
    """

    def __init__(
        self,
        step: list[tuple[int, int]],
        shape: Shape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        shared: Mapping[int, tuple[int, int]] = MappingProxyType({}),
        kept: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).to(device, dtype)

        block_size = shape.block_size
        num_tokens = sum(context for context, _ in step)
        num_rows = sum(rows for _, rows in step)
        counts = [num_blocks_for(context, block_size) for context, _ in step]
        num_blocks = sum(counts) + 2
        order = torch.randperm(num_blocks, generator=generator)
        tables = torch.full((len(step), max(counts) + 1), int(order[-1]))
        owner, position, is_new = [], [], []
        taken = 0
        for index, (context, rows) in enumerate(step):
            tables[index, : counts[index]] = order[taken : taken + counts[index]]
            taken += counts[index]
            if index in shared:
                other, length = shared[index]
                tables[index, : length // block_size] = tables[other, : length // block_size]
            owner += [index] * context
            position += range(context)
            is_new += [False] * (context - rows) + [True] * rows
        places = torch.tensor(position)
        blocks = tables[torch.tensor(owner), places // block_size]
        offsets = places % block_size

        self.step, self.shape = step, shape
        self.query = random(num_rows, shape.num_heads, shape.query_size)
        self.sinks = random(shape.num_heads)
        self._is_new = torch.tensor(is_new, device=device)
        kept = kept or dtype
        self._keys, self._values = (
            random(num_tokens, shape.num_kv_heads, size).to(kept).to(dtype)
            for size in (shape.key_size, shape.value_size)
        )
        first = [sum(context for context, _ in step[:index]) for index in range(len(step))]
        for index, (other, length) in shared.items():
            whole = length // block_size * block_size
            here, there = (slice(first[it], first[it] + whole) for it in (index, other))
            self._keys[here], self._values[here] = self._keys[there], self._values[there]
        self.new_keys, self.new_values = self._keys[self._is_new], self._values[self._is_new]
        self.cache = LayerCache(
            *(
                torch.full(
                    (num_blocks, shape.num_kv_heads, block_size, size),
                    math.nan,
                    dtype=dtype,
                    device=device,
                )
                for size in (shape.key_size, shape.value_size)
            )
        )
        old, new = ~torch.tensor(is_new), torch.tensor(is_new)
        self._all_places = blocks.to(device), offsets.to(device)
        old_places = blocks[old].to(device), slice(None), offsets[old].to(device)
        self.cache.key[old_places] = self._keys[~self._is_new]
        self.cache.value[old_places] = self._values[~self._is_new]
        self.cache = LayerCache(self.cache.key.to(kept), self.cache.value.to(kept))
        starts = [0]
        for _, rows in step:
            starts.append(starts[-1] + rows)
        self.layout = StepLayout(
            num_decodes=sum(rows == 1 for _, rows in step),
            query_starts=starts,
            context_lens=[context for context, _ in step],
            block_tables=tables.to(device),
            write_blocks=blocks[new].to(device),
            write_offsets=offsets[new].to(device),
            block_size=block_size,
        )

    def attend(self, backend: AttentionBackend, scoring: Scoring) -> torch.Tensor:
        """Returns the attention that `backend` computes, [T, num_heads, value_size]. New tensors of
        the backend begin as NaN."""
        with poisoned_memory():
            return backend.attend(
                self.query,
                self.new_keys,
                self.new_values,
                self.cache,
                self.layout,
                scoring,
            )

    def expected(self, scoring: Scoring) -> torch.Tensor:
        """Returns attention in fp64, [T, num_heads, value_size], computed for each sequence
        separately by the definition."""
        outputs = []
        first_key = 0
        starts = self.layout.query_starts
        for index, (context, rows) in enumerate(self.step):
            query = self.query[starts[index] : starts[index + 1]].double()
            group = query.shape[1] // self.shape.num_kv_heads
            span = slice(first_key, first_key + context)
            first_key += context
            key = self._keys[span].double().repeat_interleave(group, dim=1)
            value = self._values[span].double().repeat_interleave(group, dim=1)
            if self.shape.is_latent:
                key = torch.cat([value, key], dim=-1)
            scores = torch.einsum("qhd,khd->hqk", query, key) * scoring.scale
            if scoring.softcap is not None:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            seen = _seen(context, rows, scoring.pattern).to(query.device)
            scores.masked_fill_(~seen, -math.inf)
            if scoring.sinks is not None:
                sinks = scoring.sinks.double().view(-1, 1, 1).expand(-1, rows, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(dim=-1)[..., :context]
            outputs.append(torch.einsum("hqk,khd->qhd", weights, value))
        return torch.cat(outputs)

    def untouched(self) -> bool:
        """Whether the cache holds the sequences' K and V, and all other cells are unchanged."""
        key, value = (it.to(self.query.dtype) for it in (self.cache.key, self.cache.value))
        expected = LayerCache(torch.full_like(key, math.nan), torch.full_like(value, math.nan))
        blocks, offsets = self._all_places
        expected.key[blocks, :, offsets] = self._keys
        expected.value[blocks, :, offsets] = self._values
        return all(
            torch.equal(now.nan_to_num(1e4), then.nan_to_num(1e4))
            for now, then in (
                (key, expected.key),
                (value, expected.value),
            )
        )


def _seen(context: int, rows: int, pattern: Pattern) -> torch.Tensor:
    """Returns [rows, context]: which positions each query sees by its Pattern."""
    positions = torch.arange(context)
    queries = range(context - rows, context)
    first = torch.tensor([pattern.first_visible(position) for position in queries])
    return (positions <= torch.tensor(queries)[:, None]) & (positions >= first[:, None])


def random_weight(
    bits: int,
    group: int | None,
    outputs: int,
    inputs: int,
    seed: int,
    device: torch.device,
    *,
    has_offsets: bool,
) -> QuantizedWeight:
    """Returns a random weight [outputs, inputs]. `group` numbers of a row share a scale; without a
    group, each row has one scale."""
    generator, group = _generator(seed, device), group or inputs
    shape = outputs, -(-inputs * bits // 8)
    numbers = torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)
    factors = torch.rand(2, outputs, -(-inputs // group), generator=generator, device=device)
    scales = (1 + factors[0]) * 0.02 / (1 << bits)
    offsets = (factors[1] - 0.5) * 0.02 if has_offsets else None
    return QuantizedWeight(numbers, scales, bits, group, inputs, offsets).to(device)


def random_fp8_weight(outputs: int, inputs: int, seed: int, device: torch.device) -> FP8Weight:
    generator = _generator(seed, device)
    numbers = torch.randn(outputs, inputs, generator=generator, device=device) * 50
    scales = torch.rand(outputs, 1, generator=generator, device=device) * 2e-4 + 2e-4
    return FP8Weight(numbers.to(torch.float8_e4m3fn), scales)


def _generator(seed: int, device: torch.device) -> torch.Generator | None:
    """Returns a generator; None on the device `meta`, which has no values."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)


def off_by(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the norm of the difference, divided by the norm of `expected`; NaN if any value is
    NaN."""
    return float((output.double() - expected).norm() / expected.norm())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside this context, new tensors are filled with NaN, so that a read of unwritten memory
    gives NaN."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
