"""How the contexts of decodes are cut into parts."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch

from promptq.worker.engine.attention.decode_work import (
    MAX_PARTS,
    MAX_SPAN_TOKENS,
    PART_TOKENS,
    START_TOKENS,
    DecodeWork,
    cut,
    most_parts,
)
from promptq.worker.engine.attention.types import FULL, Pattern, SpanList

CPU = torch.device("cpu")
PATTERNS = [FULL, Pattern("sliding", 5000), Pattern("sliding", 1), Pattern("chunked", 777)]


def random_contexts(random: Random) -> list[int]:
    """Short, long, and padding."""
    most = [1, 300, 3000, 200_000]
    return [random.randint(0, random.choice(most)) for _ in range(random.randint(1, 20))]


def by_sequence(
    contexts: list[int], pattern: Pattern, at_once: int
) -> list[list[tuple[int, int, int]]]:
    """Each sequence's parts in order: first token, end, and place from its first place on."""
    parts: list[list[tuple[int, int, int]]] = [[] for _ in contexts]
    spans = cut(contexts, SpanList(pattern, at_once))[1:].tolist()
    for sequence, first, end, place, first_place, num_parts, tokens in spans:
        starts = range(first, max(end, first + 1), tokens)
        for at, start in enumerate(starts, start=place - first_place):
            parts[sequence].append((start, min(start + tokens, end), at))
            assert 0 <= at < num_parts
    return [sorted(each, key=lambda part: part[2]) for each in parts]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_parts_hold_each_visible_token_once(pattern: Pattern, seed: int) -> None:
    random = Random(seed)
    contexts = random_contexts(random)
    parts_of = by_sequence(contexts, pattern, at_once=random.randint(1, 70))
    for context, parts in zip(contexts, parts_of, strict=True):
        start = pattern.first_visible(context - 1) if context else 0
        firsts, ends, places = zip(*parts, strict=True)
        assert (firsts[0], ends[-1]) == (start, context)
        assert firsts[1:] == ends[:-1]
        assert places == tuple(range(len(parts)))
        assert len(parts) <= most_parts(context) <= MAX_PARTS
        if len(parts) > 1:
            assert min(end - first for first, end, _ in parts[:-1]) >= PART_TOKENS


def test_places_of_all_sequences_are_apart(seed: int) -> None:
    contexts = random_contexts(Random(seed))
    work = cut(contexts, SpanList(FULL, 66))
    assert work[0, 0] == len(work) - 1
    places = {
        place
        for _, first, end, first_of_span, _, _, tokens in work[1:].tolist()
        for place in range(first_of_span, first_of_span + max(1, -(-(end - first) // tokens)))
    }
    assert places == set(range(sum({row[0]: row[5] for row in work[1:].tolist()}.values())))


def test_how_a_context_is_cut_depends_on_it_alone(seed: int) -> None:
    """The spans differ, but not the parts."""
    random = Random(seed)
    contexts = random_contexts(random)
    for pattern in PATTERNS:
        together = by_sequence(contexts, pattern, random.randint(1, 70))
        assert together == [by_sequence([context], pattern, 66)[0] for context in contexts]


@pytest.mark.parametrize(
    "contexts",
    [[32_000] + [1000] * 63, [128_000], [9000, 300, 300, 1], [1000] * 64, [1000], [300] * 200],
)
def test_programs_have_about_the_same_work(contexts: list[int]) -> None:
    """They take every n-th of the spans for each KV head. No span is started in vain: with one
    part for each, no program would be done much earlier."""
    num_kv_heads, num_programs = 8, 264
    at_once = num_programs // num_kv_heads
    spans = cut(contexts, SpanList(FULL, at_once))[1:, 1:3].tolist()
    length = [end - first for first, end in spans]
    assert length == sorted(length, reverse=True)
    num_items, tokens = Counter[int](), Counter[int]()
    for item in range(len(length) * num_kv_heads):
        num_items[item % num_programs] += 1
        tokens[item % num_programs] += length[item // num_kv_heads]
    busiest = max(tokens.values()) + START_TOKENS * max(num_items.values())
    parts = sum(-(-context // PART_TOKENS) for context in contexts)
    rounds = -(-parts // at_once)
    assert busiest <= rounds * (PART_TOKENS + START_TOKENS) * 1.0001 or len(contexts) == 1
    total = sum(contexts) * num_kv_heads
    assert max(tokens.values()) <= total / num_programs + max(length)


def test_many_sequences_have_long_spans_and_few_have_short_ones() -> None:
    def most_tokens(contexts: list[int]) -> int:
        spans = cut(contexts, SpanList(FULL, 66))[1:]
        return int((spans[:, 2] - spans[:, 1]).max())

    assert most_tokens([1000]) == PART_TOKENS
    assert most_tokens([1000] * 16) == PART_TOKENS
    assert most_tokens([1000] * 64) == 1000
    assert most_tokens([16_000] * 64) == MAX_SPAN_TOKENS


def test_other_contexts_take_the_place_of_the_first(seed: int) -> None:
    """At the same addresses, and for every list that was asked for."""
    random = Random(seed)
    work = DecodeWork([6000] * 5, CPU)
    before = {(it := SpanList(pattern, 33)): work.spans(it) for pattern in PATTERNS}
    results = work.results(8, 2, 64)
    contexts = [random.randint(0, 6000) for _ in range(5)]
    work.fill(contexts)
    for asked, spans in before.items():
        expected = torch.from_numpy(cut(contexts, asked))
        assert work.spans(asked) is spans
        assert torch.equal(spans[: len(expected)], expected)
    assert work.results(8, 2, 64) is results
    assert not results.num_finished.any()
