"""Blocks: one owner or several, one state each, shared only when they hold the same prefix."""

from __future__ import annotations

import random
from collections.abc import Callable
from operator import setitem
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.block_manager import BlockManager
from promptq.worker.engine.core.sequence import Sequence

BLOCK = 4


def make_sequence(token_ids: list[int], sequence_id: int = 0, cache_salt: str = "") -> Sequence:
    return Sequence.of(
        EngineRequest(
            sequence_id, token_ids, SamplingParams(), seed=0, max_tokens=100, cache_salt=cache_salt
        )
    )


def compute(manager: BlockManager, sequence: Sequence) -> None:
    """Updates the blocks as the engine does after a step has computed all known tokens."""
    start, sequence.num_computed_tokens = sequence.num_computed_tokens, sequence.num_tokens
    manager.mark_computed(sequence, start, sequence.num_tokens)


def admit(manager: BlockManager, sequence: Sequence) -> int:
    """Allocate with the cached prefix; returns how many blocks were found."""
    prefix = manager.find_prefix(sequence)
    manager.allocate(sequence, prefix)
    sequence.num_computed_tokens = len(prefix) * manager.block_size
    return len(prefix)


def compute_and_free(
    manager: BlockManager, token_ids: list[int], cache_salt: str = ""
) -> list[int]:
    sequence = make_sequence(token_ids, cache_salt=cache_salt)
    admit(manager, sequence)
    compute(manager, sequence)
    blocks = list(sequence.block_table)
    manager.free(sequence)
    return blocks


def test_allocation_covers_the_known_tokens_and_free_returns_everything() -> None:
    manager = BlockManager(10, BLOCK)
    sequence = make_sequence(list(range(9)))
    admit(manager, sequence)
    assert len(set(sequence.block_table)) == 3
    assert (manager.num_free, manager.num_used, manager.num_cached) == (7, 3, 0)
    manager.check_integrity([sequence])
    manager.free(sequence)
    assert sequence.block_table == []
    assert (manager.num_free, manager.num_used, manager.num_cached) == (10, 0, 0)
    manager.check_integrity([])


def test_extend_takes_a_block_only_at_a_block_border() -> None:
    manager = BlockManager(3, BLOCK)
    sequence = make_sequence([1, 2, 3])
    admit(manager, sequence)
    taken = []
    for token_id in range(9):
        sequence.token_ids.append(token_id)
        assert manager.extend(sequence)
        taken.append(len(sequence.block_table))
    assert taken == [1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_extend_without_room_changes_nothing() -> None:
    manager = BlockManager(2, BLOCK)
    sequence, other = make_sequence([1] * 4, 1), make_sequence([2] * 3, 2)
    admit(manager, sequence)
    admit(manager, other)
    sequence.token_ids.append(3)
    before = list(sequence.block_table)
    assert not manager.extend(sequence)
    assert sequence.block_table == before
    manager.check_integrity([sequence, other])


def test_allocate_without_room_is_refused_and_changes_nothing() -> None:
    manager = BlockManager(2, BLOCK)
    sequence = make_sequence([1] * 12)
    with pytest.raises(RuntimeError, match="needs 3 blocks and 2 are free"):
        manager.allocate(sequence, [])
    assert manager.num_free == 2
    assert sequence.block_table == []


def test_a_computed_prefix_is_found_after_its_owner_left() -> None:
    manager = BlockManager(10, BLOCK)
    blocks = compute_and_free(manager, list(range(10)))
    assert manager.num_cached == 2, "the half full third block holds nothing to share"
    again = make_sequence([*range(8), 99])
    assert manager.find_prefix(again) == blocks[:2]


def test_a_block_is_not_shared_before_it_is_computed() -> None:
    manager = BlockManager(10, BLOCK)
    writer, reader = make_sequence(list(range(9)), 1), make_sequence(list(range(9)), 2)
    admit(manager, writer)
    assert manager.find_prefix(reader) == []
    manager.mark_computed(writer, 0, 6)
    assert manager.find_prefix(reader) == writer.block_table[:1], "the second one is half written"
    manager.mark_computed(writer, 6, 9)
    assert manager.find_prefix(reader) == writer.block_table[:2]


def test_a_lookup_leaves_a_token_to_compute() -> None:
    manager = BlockManager(10, BLOCK)
    compute_and_free(manager, list(range(8)))
    assert len(manager.find_prefix(make_sequence(list(range(8))))) == 1
    assert len(manager.find_prefix(make_sequence(list(range(9))))) == 2


def test_equal_blocks_behind_different_beginnings_are_not_shared() -> None:
    manager = BlockManager(10, BLOCK)
    compute_and_free(manager, [1, 1, 1, 1, 5, 6, 7, 8])
    assert manager.find_prefix(make_sequence([2, 2, 2, 2, 5, 6, 7, 8, 9])) == []
    assert manager.find_prefix(make_sequence([5, 6, 7, 8, 9])) == []


def test_only_the_same_salt_shares() -> None:
    manager = BlockManager(10, BLOCK)
    tokens = list(range(8))
    compute_and_free(manager, tokens, cache_salt="a")
    assert manager.find_prefix(make_sequence([*tokens, 9])) == []
    assert manager.find_prefix(make_sequence([*tokens, 9], cache_salt="b")) == []
    assert len(manager.find_prefix(make_sequence([*tokens, 9], cache_salt="a"))) == 2


def test_a_shared_block_is_free_only_when_its_last_owner_left() -> None:
    manager = BlockManager(10, BLOCK)
    first, second = make_sequence(list(range(9)), 1), make_sequence(list(range(9)), 2)
    admit(manager, first)
    compute(manager, first)
    assert admit(manager, second) == 2
    assert manager.num_used == 4
    manager.free(first)
    assert manager.num_used == 3
    manager.check_integrity([second])
    manager.free(second)
    assert (manager.num_used, manager.num_cached) == (0, 2)
    manager.check_integrity([])


def test_two_who_computed_the_same_block_keep_their_own() -> None:
    manager = BlockManager(10, BLOCK)
    first, second = make_sequence(list(range(5)), 1), make_sequence(list(range(5)), 2)
    for sequence in (first, second):
        admit(manager, sequence)
    for sequence in (first, second):
        compute(manager, sequence)
    assert not set(first.block_table) & set(second.block_table)
    manager.check_integrity([first, second])
    manager.free(second)
    manager.free(first)
    assert manager.num_cached == 1
    manager.check_integrity([])


def test_cached_blocks_are_taken_only_when_free_ones_are_gone() -> None:
    manager = BlockManager(4, BLOCK)
    blocks = compute_and_free(manager, list(range(8)))
    other = make_sequence([50] * 8)
    admit(manager, other)
    assert not set(other.block_table) & set(blocks)
    assert manager.num_cached == 2


def test_eviction_takes_the_least_recently_used_and_a_tail_before_its_parent() -> None:
    manager = BlockManager(4, BLOCK)
    old, new = list(range(8)), list(range(50, 58))
    compute_and_free(manager, old)
    compute_and_free(manager, new)
    found: list[tuple[int, int]] = []
    for num_tokens in (4, 4, 4):
        admit(manager, make_sequence([90 + len(found)] * num_tokens))
        found.append(
            (
                len(manager.find_prefix(make_sequence([*old, 1]))),
                len(manager.find_prefix(make_sequence([*new, 1]))),
            )
        )
    assert found == [(1, 2), (0, 2), (0, 1)]


def test_using_a_prefix_again_makes_it_recently_used() -> None:
    manager = BlockManager(4, BLOCK)
    old, new = list(range(8)), list(range(50, 58))
    compute_and_free(manager, old)
    compute_and_free(manager, new)
    reader = make_sequence(old)
    assert admit(manager, reader) == 1
    manager.free(reader)
    admit(manager, make_sequence([90] * 12))
    assert len(manager.find_prefix(make_sequence([*old, 1]))) == 1
    assert manager.find_prefix(make_sequence([*new, 1])) == []


def test_what_is_needed_counts_a_prefix_without_owner_but_not_one_with_an_owner() -> None:
    manager = BlockManager(6, BLOCK)
    owner, reader = make_sequence(list(range(9)), 1), make_sequence(list(range(12)), 2)
    admit(manager, owner)
    compute(manager, owner)
    assert manager.num_needed(reader, manager.find_prefix(reader)) == 1
    manager.free(owner)
    assert manager.num_needed(reader, manager.find_prefix(reader)) == 3


def test_what_would_be_free_if_sequences_left_counts_shared_blocks_once_all_owners_left() -> None:
    manager = BlockManager(8, BLOCK)
    first, second = make_sequence(list(range(9)), 1), make_sequence(list(range(9)), 2)
    admit(manager, first)
    compute(manager, first)
    admit(manager, second)
    assert manager.num_free == 4
    freed = list(manager.num_free_after([first, second], []))
    assert freed == [(first, 5), (second, 8)]
    reader = make_sequence(list(range(9)), 3)
    prefix = manager.find_prefix(reader)
    freed = list(manager.num_free_after([first, second], prefix))
    assert freed == [(first, 5), (second, 6)], "the prefix is not free for its reader to take"
    manager.check_integrity([first, second])


def freed_while_in_use(manager: BlockManager, sequence: Sequence, thief: Sequence) -> None:
    thief.block_table.append(sequence.block_table[0])
    manager.free(thief)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (
            lambda _, sequence, __: sequence.block_table.pop(),
            r"\[1\] are in several states, in none",
        ),
        (
            lambda _, sequence, thief: thief.block_table.append(sequence.block_table[0]),
            "1 references and 2 block table entries",
        ),
        (freed_while_in_use, r"3 free .* 2 owned against 4 blocks"),
        (lambda _, sequence, __: setitem(sequence.block_table, 0, 17), "17"),
    ],
    ids=["lost its table entry", "has one too many", "was freed while in use", "does not exist"],
)
def test_the_audit_names_a_block(harm: Callable[..., Any], said: str) -> None:
    manager = BlockManager(4, BLOCK)
    sequence, thief = make_sequence(list(range(6)), 1), make_sequence([9], 2)
    admit(manager, sequence)
    harm(manager, sequence, thief)
    with pytest.raises(RuntimeError, match=said):
        manager.check_integrity([sequence, thief])


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 12))
def test_any_history_adds_up_and_finds_only_what_was_computed(seed: int, num_blocks: int) -> None:
    """A model of the cache by content: every found block holds exactly the prefix asked for."""
    chance = random.Random(seed)
    manager = BlockManager(num_blocks, 2)
    holds: dict[int, tuple[str, tuple[int, ...]]] = {}
    present: list[Sequence] = []
    for sequence_id in range(60):
        if present and chance.random() < 0.4:
            manager.free(present.pop(chance.randrange(len(present))))
        elif present and chance.random() < 0.5:
            sequence = chance.choice(present)
            sequence.token_ids.append(chance.randrange(2))
            if not manager.extend(sequence):
                sequence.token_ids.pop()
        else:
            tokens = [chance.randrange(2) for _ in range(chance.randint(1, 9))]
            sequence = make_sequence(tokens, sequence_id, cache_salt=chance.choice(["", "salt"]))
            prefix = manager.find_prefix(sequence)
            assert len(prefix) * 2 < len(tokens)
            for index, block in enumerate(prefix):
                salt = sequence.request.cache_salt
                assert holds[block] == (salt, tuple(tokens[: 2 * index + 2]))
            if manager.num_needed(sequence, prefix) > manager.num_free:
                continue
            manager.allocate(sequence, prefix)
            sequence.num_computed_tokens = len(prefix) * 2
            present.append(sequence)
        if present:
            sequence = chance.choice(present)
            start = sequence.num_computed_tokens
            end = chance.randint(start, sequence.num_tokens)
            for index in range(start // 2, end // 2):
                content = tuple(sequence.token_ids[: 2 * index + 2])
                holds[sequence.block_table[index]] = (sequence.request.cache_salt, content)
            sequence.num_computed_tokens = end
            manager.mark_computed(sequence, start, end)
        manager.check_integrity(present)
    for sequence in present:
        manager.free(sequence)
    manager.check_integrity([])
    assert manager.num_free == num_blocks
