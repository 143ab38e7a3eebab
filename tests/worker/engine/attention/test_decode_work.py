"""How the contexts of decodes are cut into parts."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch

from promptq.worker.engine.attention.backend import FULL, Pattern
from promptq.worker.engine.attention.decode_work import (
    MAX_PARTS,
    PART_TOKENS,
    DecodeWork,
    cut,
    most_parts,
)

CPU = torch.device("cpu")
PATTERNS = [FULL, Pattern("sliding", 5000), Pattern("sliding", 1), Pattern("chunked", 777)]


def random_contexts(random: Random) -> list[int]:
    """Short, long, and padding."""
    most = [1, 300, 3000, 200_000]
    return [random.randint(0, random.choice(most)) for _ in range(random.randint(1, 20))]


def by_sequence(contexts: list[int], pattern: Pattern) -> list[list[tuple[int, int, int]]]:
    """Each sequence's parts in order: first token, end, and place from its first place on."""
    parts: list[list[tuple[int, int, int]]] = [[] for _ in contexts]
    for sequence, first, end, place, first_place, num_parts in cut(contexts, pattern)[1:].tolist():
        parts[sequence].append((first, end, place - first_place))
        assert 0 <= place - first_place < num_parts
    return [sorted(each, key=lambda part: part[2]) for each in parts]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_parts_hold_each_visible_token_once(pattern: Pattern, seed: int) -> None:
    contexts = random_contexts(Random(seed))
    work = cut(contexts, pattern)
    assert work[0, 0] == len(work) - 1
    assert sorted(work[1:, 3].tolist()) == list(range(len(work) - 1))
    for context, parts in zip(contexts, by_sequence(contexts, pattern), strict=True):
        start = pattern.first_visible(context - 1) if context else 0
        firsts, ends, places = zip(*parts, strict=True)
        assert (firsts[0], ends[-1]) == (start, context)
        assert firsts[1:] == ends[:-1]
        assert places == tuple(range(len(parts)))
        assert len(parts) <= most_parts(context) <= MAX_PARTS
        if len(parts) > 1:
            assert min(end - first for first, end, _ in parts[:-1]) >= PART_TOKENS


def test_how_a_context_is_cut_depends_on_it_alone(seed: int) -> None:
    contexts = random_contexts(Random(seed))
    for pattern in PATTERNS:
        together = by_sequence(contexts, pattern)
        assert together == [by_sequence([context], pattern)[0] for context in contexts]


@pytest.mark.parametrize("contexts", [[32_000] + [1000] * 63, [128_000], [9000, 300, 300, 1]])
def test_one_long_context_stalls_no_program(contexts: list[int]) -> None:
    """Programs take every n-th of the parts for each KV head."""
    num_kv_heads, num_programs = 8, 264
    length = [end - first for first, end in cut(contexts, FULL)[1:, 1:3].tolist()]
    assert length == sorted(length, reverse=True)
    num_items, tokens = Counter[int](), Counter[int]()
    for item in range(len(length) * num_kv_heads):
        num_items[item % num_programs] += 1
        tokens[item % num_programs] += length[item // num_kv_heads]
    assert max(num_items.values()) - min(num_items[program] for program in range(num_programs)) <= 1
    total = sum(contexts) * num_kv_heads
    assert max(tokens.values()) <= total / num_programs + max(length)


def test_other_contexts_take_the_place_of_the_first(seed: int) -> None:
    """At the same addresses, and for every pattern that was asked for."""
    random = Random(seed)
    work = DecodeWork([6000] * 5, CPU)
    before = {pattern: work.parts(pattern) for pattern in PATTERNS}
    results = work.results(8, 2, 64)
    contexts = [random.randint(0, 6000) for _ in range(5)]
    work.fill(contexts)
    for pattern, parts in before.items():
        expected = torch.from_numpy(cut(contexts, pattern))
        assert work.parts(pattern) is parts
        assert torch.equal(parts[: len(expected)], expected)
    assert work.results(8, 2, 64) is results
    assert not results.num_finished.any()
