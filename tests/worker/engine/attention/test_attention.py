"""Paged attention against plain fp32 attention of each sequence by itself."""

from __future__ import annotations

import math

import pytest
import torch

from promptq.worker.engine.attention import torch_paged
from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.types import (
    FULL,
    LayerCache,
    LayerSpec,
    Pattern,
    Scoring,
    StepLayout,
)
from promptq.worker.engine.model.backend_choice import backends_on

SEED = 11
BLOCK_SIZE = 4
PATTERNS = [FULL, Pattern("sliding", 6), Pattern("sliding", 1), Pattern("chunked", 8)]
SHAPES = [(4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 16, 12), (3, 3, 8, 24)]
"""num_heads, num_kv_heads, key_size, value_size"""

on_every_backend = pytest.mark.parametrize(
    "backend", backends_on(torch.device("cpu"), "auto"), ids=lambda backend: backend.name
)

# (context after the step, rows in the step), decodes in descending order, then chunks
STEPS = {
    "decodes": [(33, 1), (24, 1), (17, 1), (8, 1), (1, 1)],
    "equal decodes": [(16, 1), (16, 1), (16, 1)],
    "whole prompts": [(9, 9), (2, 2), (25, 25)],
    "later chunks": [(21, 5), (16, 8), (24, 16), (12, 3)],
    "all at once": [(30, 1), (9, 1), (20, 20), (19, 6), (18, 17), (32, 2)],
}


class Case:
    """Random sequences in a cache in which all else is not a number."""

    def __init__(
        self, step: list[tuple[int, int]], shape: tuple[int, int, int, int], dtype: torch.dtype
    ) -> None:
        num_heads, num_kv_heads, key_size, value_size = shape
        generator = torch.Generator().manual_seed(SEED)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).to(dtype)

        num_blocks = 1 + sum(-(-context // BLOCK_SIZE) for context, _ in step)
        shuffled = torch.randperm(num_blocks, generator=generator).tolist()
        self.cache = LayerCache(
            torch.full((num_blocks, num_kv_heads, BLOCK_SIZE, key_size), math.nan, dtype=dtype),
            torch.full((num_blocks, num_kv_heads, BLOCK_SIZE, value_size), math.nan, dtype=dtype),
        )
        self.keys, self.values, self.queries = [], [], []
        tables, places = [], []
        for context, rows in step:
            key = random(context, num_kv_heads, key_size)
            value = random(context, num_kv_heads, value_size)
            table = [shuffled.pop() for _ in range(-(-context // BLOCK_SIZE))]
            for position in range(context - rows):
                block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                self.cache.key[block, :, offset] = key[position]
                self.cache.value[block, :, offset] = value[position]
            places += [
                (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                for position in range(context - rows, context)
            ]
            tables.append(table)
            self.keys.append(key)
            self.values.append(value)
            self.queries.append(random(rows, num_heads, key_size))
        width = max(map(len, tables))
        starts = [0]
        for _, rows in step:
            starts.append(starts[-1] + rows)
        self.step = step
        self.unused = shuffled
        self.layout = StepLayout(
            num_decodes=sum(rows == 1 for _, rows in step),
            query_starts=starts,
            context_lens=[context for context, _ in step],
            block_tables=torch.tensor(
                [table + [shuffled[0]] * (width - len(table)) for table in tables]
            ),
            write_blocks=torch.tensor([block for block, _ in places]),
            write_offsets=torch.tensor([offset for _, offset in places]),
            block_size=BLOCK_SIZE,
        )
        self.sinks = random(num_heads)

    def attend(self, backend: AttentionBackend, scoring: Scoring) -> torch.Tensor:
        news = [rows for _, rows in self.step]
        return backend.attend(
            torch.cat(self.queries),
            torch.cat([key[-rows:] for key, rows in zip(self.keys, news, strict=True)]),
            torch.cat([value[-rows:] for value, rows in zip(self.values, news, strict=True)]),
            self.cache,
            self.layout,
            scoring,
        )

    def expected(self, scoring: Scoring) -> torch.Tensor:
        outputs = []
        for query, key, value in zip(self.queries, self.keys, self.values, strict=True):
            rows, context = len(query), len(key)
            group = query.shape[1] // key.shape[1]
            key = key.float().repeat_interleave(group, dim=1)
            value = value.float().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scoring.scale
            if scoring.softcap is not None:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            for row in range(rows):
                position = context - rows + row
                scores[:, row, position + 1 :] = -math.inf
                scores[:, row, : scoring.pattern.first_visible(position)] = -math.inf
            if scoring.sinks is not None:
                sinks = scoring.sinks.float().view(-1, 1, 1).expand(-1, rows, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(dim=-1)[..., :context]
            outputs.append(torch.einsum("hqk,khd->qhd", weights, value))
        return torch.cat(outputs)


def asked_of(scoring: Scoring) -> frozenset[str]:
    """Returns the requirements of a layer with this scoring."""
    asked = {"softcap": scoring.softcap, "sinks": scoring.sinks}
    names = frozenset(name for name, value in asked.items() if value is not None)
    return LayerSpec(
        1, 1, 1, 1, torch.float32, torch.float32, scoring.pattern, None, names
    ).features


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("step", STEPS)
@on_every_backend
def test_equals_plain_attention(backend: AttentionBackend, step: str, pattern: Pattern) -> None:
    for shape in SHAPES:
        for softcap, with_sinks in ((None, False), (2.0, False), (None, True), (1.0, True)):
            case = Case(STEPS[step], shape, torch.float32)
            scoring = Scoring(0.3, pattern, softcap, case.sinks if with_sinks else None)
            if asked_of(scoring) & backend.refuses:
                continue
            torch.testing.assert_close(case.attend(backend, scoring), case.expected(scoring))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_every_backend
def test_low_precision(backend: AttentionBackend, dtype: torch.dtype) -> None:
    if dtype not in backend.dtypes:
        pytest.skip("refused")
    for softcap in (None, 2.0):
        case = Case(STEPS["all at once"], (6, 2, 8, 8), dtype)
        scoring = Scoring(0.3, Pattern("sliding", 6), softcap)
        if asked_of(scoring) & backend.refuses:
            continue
        output = case.attend(backend, scoring)
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), case.expected(scoring), atol=0.03, rtol=0.03)


@on_every_backend
def test_writes_only_its_own_places(backend: AttentionBackend) -> None:
    """Places that the step does not own keep their contents."""
    case = Case(STEPS["all at once"], (4, 2, 8, 8), torch.float32)
    before = case.cache.key.isnan()
    case.attend(backend, Scoring(0.3))
    written = before & ~case.cache.key.isnan()
    assert int(written.sum()) == sum(rows for _, rows in case.step) * 2 * 8
    assert bool(case.cache.key[case.unused].isnan().all())


def test_groups_and_tiles_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes are cut into groups, and queries into tiles, so that memory stays bounded."""
    backend = torch_paged.TorchPaged()
    case = Case(STEPS["all at once"], (6, 2, 8, 8), torch.float32)
    decodes = Case(STEPS["decodes"], (6, 2, 8, 8), torch.float32)
    monkeypatch.setattr(torch_paged, "MAX_GATHERED_TOKENS", 20)
    monkeypatch.setattr(torch_paged, "MAX_SCORES", 600)
    for scoring in (Scoring(0.3), Scoring(0.3, softcap=2.0)):
        torch.testing.assert_close(case.attend(backend, scoring), case.expected(scoring))
        torch.testing.assert_close(decodes.attend(backend, scoring), decodes.expected(scoring))


def test_one_long_context_does_not_pad_the_short_ones() -> None:
    assert torch_paged._similar([5000, 100, 90, 20]) == [(0, 1), (1, 4)]
    assert torch_paged._similar([60000, 60000]) == [(0, 1), (1, 2)]
    assert torch_paged._similar([40, 3, 2]) == [(0, 3)]
    assert torch_paged._similar([]) == []


def test_pattern_sees() -> None:
    assert [FULL.first_visible(position) for position in (0, 7)] == [0, 0]
    assert [Pattern("sliding", 3).first_visible(position) for position in (0, 2, 3)] == [0, 0, 1]
    assert [Pattern("chunked", 4).first_visible(position) for position in (3, 4, 9)] == [0, 4, 8]
    assert Pattern("sliding", 64).shortened(64) == FULL
    assert Pattern("sliding", 64).shortened(65) == Pattern("sliding", 64)
