"""Native attention against plain attention in higher precision, and each row against it alone."""

from __future__ import annotations

from ctypes import byref
from itertools import product

import pytest
import torch

from benchmarks.gpu.cases import Case, Shape, off_by
from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.types import (
    FULL,
    SCALE_BYTES,
    LayerCache,
    Pattern,
    Scoring,
    StepLayout,
)
from promptq.worker.engine.decoders.native_weights import latent_cache, native_cache
from promptq.worker.engine.native import library
from promptq.worker.engine.native.library import Layout, load_native

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
PATTERNS = [FULL, Pattern("sliding", 6), Pattern("sliding", 33), Pattern("chunked", 24)]
SHAPES = [
    Shape(4, 4, 64, 64, block_size=16),
    Shape(8, 2, 128, 128, block_size=32),
    Shape(3, 1, 24, 24, block_size=16),
    Shape(18, 2, 32, 32, block_size=5),
    Shape(10, 2, 40, 40, block_size=8),
    Shape(16, 1, 64, 512, block_size=16, is_latent=True),
    Shape(10, 1, 12, 40, block_size=5, is_latent=True),
]
STEPS = {
    "decodes": [(170, 1), (33, 1), (32, 1), (16, 1), (1, 1)],
    "whole prompts": [(9, 9), (75, 75), (1, 1), (17, 17)],
    "all at once": [(130, 1), (9, 1), (20, 20), (19, 6), (18, 17), (272, 40)],
}

SHARING = [(420, 1), (401, 1), (400, 1), (399, 1), (398, 1), (397, 1), (396, 1)]
SHARING += [(380, 1), (370, 1), (350, 1), (390, 20)]
SHARED = {1: (0, 320), 2: (1, 320), 3: (0, 108), 5: (4, 384), 6: (5, 300), 8: (0, 40), 10: (0, 320)}
"""Prefixes of decodes, long and short, of two kinds, one within another; and that of a chunk."""


class Native(AttentionBackend):
    name = "native"
    devices = frozenset({"cpu"})

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: LayerCache,
        layout: StepLayout,
        scoring: Scoring,
    ) -> torch.Tensor:
        cache.key[layout.write_blocks, :, layout.write_offsets] = keys
        cache.value[layout.write_blocks, :, layout.write_offsets] = values
        starts, contexts = layout.query_starts, layout.context_lens
        return over(cache, scoring, query, starts, contexts, layout.block_tables)


def over(
    cache: LayerCache,
    scoring: Scoring,
    query: torch.Tensor,
    starts: list[int],
    contexts: list[int],
    tables: torch.Tensor,
) -> torch.Tensor:
    """Attention over a cache that holds all K and V. Queries of latents are longer than K."""
    query, tables = query.contiguous(), tables.contiguous()
    key, value = cache.key, cache.value
    key_size, value_size = (
        each.shape[3] - (SCALE_BYTES if each.dtype == torch.uint8 else 0) for each in (key, value)
    )
    if query.shape[2] > key_size:
        cache = LayerCache(torch.cat([value, key], dim=-1), value)
        described = latent_cache(cache, scoring.pattern, query.shape[1], value_size)
    else:
        described = native_cache(cache, scoring.pattern)
    found, starts_at, lengths = (
        query.new_empty(*query.shape[:2], value_size),
        torch.tensor(starts),
        torch.tensor(contexts),
    )
    layout = Layout(
        num_sequences=len(contexts),
        max_blocks=tables.shape[1],
        query_starts=starts_at.data_ptr(),
        context_lens=lengths.data_ptr(),
        block_tables=tables.data_ptr(),
    )
    load_native().paged_attention(
        query.dtype == torch.bfloat16,
        query.data_ptr(),
        query.shape[1],
        byref(described),
        byref(layout),
        byref(
            library.Scoring(
                scale=scoring.scale,
                softcap=scoring.softcap or 0.0,
                sinks=None if scoring.sinks is None else scoring.sinks.data_ptr(),
            )
        ),
        found.data_ptr(),
    )
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_equals_plain_attention(step: str, pattern: Pattern, dtype: torch.dtype, seed: int) -> None:
    for shape in SHAPES:
        case = Case(STEPS[step], shape, dtype=dtype, device=CPU, seed=seed)
        scoring = Scoring(0.3, pattern)
        output = case.attend(Native(), scoring)
        assert output.dtype == dtype
        assert off_by(output, case.expected(scoring)) < TOLERANCE[dtype], shape


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_caps_scores_and_leaves_weight_to_sinks(
    softcap: float | None, has_sinks: bool, dtype: torch.dtype, seed: int
) -> None:
    for shape in SHAPES:
        case = Case(STEPS["all at once"], shape, dtype=dtype, device=CPU, seed=seed)
        sinks = 3 * case.sinks.float() if has_sinks else None
        scoring = Scoring(0.3, Pattern("sliding", 33), softcap, sinks)
        expected = case.expected(scoring)
        assert off_by(case.attend(Native(), scoring), expected) < TOLERANCE[dtype], shape
        plain = case.expected(Scoring(0.3, Pattern("sliding", 33)))
        assert (off_by(plain, expected) > 2 * TOLERANCE[dtype]) == (
            has_sinks or softcap is not None
        )


def in_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a cache as cache_rows.h says, and what they stand for."""
    scale = (rows.float().abs().amax(-1, keepdim=True) / 127).bfloat16()
    steps = (rows.float() / scale.float().clamp_min(1e-30)).round().clamp(-127, 127)
    stored = torch.cat([steps.to(torch.int8).view(torch.uint8), scale.view(torch.uint8)], dim=-1)
    return stored, (steps * scale.float()).to(rows.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_rows_in_int8_are_what_they_stand_for(step: str, dtype: torch.dtype, seed: int) -> None:
    """Also to the last bit for each row alone."""
    for shape in SHAPES:
        case = Case(STEPS[step], shape, dtype=dtype, device=CPU, seed=seed)
        scoring, layout = Scoring(0.3, FULL), case.layout
        case.attend(Native(), scoring)  # which writes K and V
        keys, meant_keys = in_int8(case.cache.key)
        values, meant_values = in_int8(case.cache.value)
        rounded, meant = LayerCache(keys, values), LayerCache(meant_keys, meant_values)
        rest = (case.query, layout.query_starts, layout.context_lens, layout.block_tables)
        found, expected = over(rounded, scoring, *rest), over(meant, scoring, *rest)
        assert off_by(found, expected.double()) < TOLERANCE[dtype], shape
        row = 0
        for index, (context, rows) in enumerate(case.step):
            for position in range(context - rows, context):
                query, table = case.query[row : row + 1], layout.block_tables[index : index + 1]
                alone = over(rounded, scoring, query, [0, 1], [position + 1], table)
                assert torch.equal(alone[0], found[row]), (shape, index, position)
                row += 1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_sequences_may_share_blocks(pattern: Pattern, dtype: torch.dtype, seed: int) -> None:
    for shape in SHAPES:
        case = Case(SHARING, shape, dtype=dtype, device=CPU, seed=seed, shared=SHARED)
        scoring = Scoring(0.3, pattern)
        output = case.attend(Native(), scoring)
        assert off_by(output, case.expected(scoring)) < TOLERANCE[dtype], shape


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_rows_do_not_depend_on_each_other(pattern: Pattern, dtype: torch.dtype, seed: int) -> None:
    """To the last bit, for a row of a chunk becomes a decode when a sequence is taken up again."""
    for shape, (step, shared) in product(SHAPES, [(STEPS["all at once"], {}), (SHARING, SHARED)]):
        case = Case(step, shape, dtype=dtype, device=CPU, seed=seed, shared=shared)
        scoring, layout = Scoring(0.3, pattern), case.layout
        together = case.attend(Native(), scoring)
        row = 0
        for index, (context, rows) in enumerate(case.step):
            for position in range(context - rows, context):
                query, table = case.query[row : row + 1], layout.block_tables[index : index + 1]
                alone = over(case.cache, scoring, query, [0, 1], [position + 1], table)
                assert torch.equal(alone[0], together[row]), (shape, index, position)
                row += 1
