"""Packing: every token of a step in one row, at its position, with its place in the cache."""

from __future__ import annotations

import pytest
import torch

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention.packed_step import Packer
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence

BLOCK_SIZE = 4


def sequence(sequence_id: int, num_tokens: int, slot: int, blocks: list[int]) -> Sequence:
    tokens = [100 * sequence_id + position for position in range(num_tokens)]
    made = Sequence.of(EngineRequest(sequence_id, tokens, SamplingParams(), seed=0, max_tokens=9))
    made.slot, made.block_table = slot, blocks
    return made


def test_decodes_come_first_longest_context_first() -> None:
    packer = Packer(BLOCK_SIZE, torch.device("cpu"))
    short = ScheduledSequence(sequence(1, 3, 0, [7]), 2, 1, samples=True)
    chunk = ScheduledSequence(sequence(2, 9, 1, [5, 2, 9]), 3, 3, samples=False)
    long = ScheduledSequence(sequence(3, 6, 2, [1, 8]), 5, 1, samples=True)
    step = packer.pack(Batch([short, chunk, long]))
    layout = step.layout
    assert step.items == [long, short, chunk]
    assert step.input_ids.tolist() == [[305, 102, 203, 204, 205]]
    assert step.positions.tolist() == [[5, 2, 3, 4, 5]]
    assert layout.num_decodes == 2
    assert layout.query_starts == [0, 1, 2, 5]
    assert layout.context_lens == [6, 3, 6]
    assert layout.write_blocks.tolist() == [8, 7, 5, 2, 2]
    assert layout.write_offsets.tolist() == [1, 2, 3, 0, 1]
    assert layout.block_tables[:, 0].tolist() == [1, 7, 5]
    assert layout.block_tables[2].tolist() == [5, 2, 9]
    assert step.sampled.tolist() == [1, 0]


def test_a_draft_follows_the_last_token_and_short_chunks_come_before_long_ones() -> None:
    prompt = ScheduledSequence(sequence(1, 9, 0, [5, 2, 9]), 0, 9, samples=True)
    drafted = ScheduledSequence(sequence(2, 3, 1, [7, 3]), 2, 1, samples=True, draft=(41, 42))
    decode = ScheduledSequence(sequence(3, 2, 2, [6]), 1, 1, samples=True)
    step = Packer(BLOCK_SIZE, torch.device("cpu")).pack(Batch([prompt, drafted, decode]))
    layout = step.layout
    assert step.items == [decode, drafted, prompt]
    assert step.input_ids.tolist()[0][:5] == [301, 202, 41, 42, 100]
    assert step.positions.tolist()[0][:5] == [1, 2, 3, 4, 0]
    assert layout.num_decodes == 1
    assert layout.query_starts == [0, 1, 4, 13]
    assert layout.context_lens == [2, 5, 9]
    assert layout.write_blocks.tolist()[1:4] == [7, 7, 3]
    assert step.sampled.tolist() == [12, 1, 2, 3, 0]


def test_a_slot_forgets_its_former_owner() -> None:
    """Also one whose block table was as long."""
    packer = Packer(BLOCK_SIZE, torch.device("cpu"))
    for blocks in ([3, 4], [5, 6], [5, 8], [9], [9, 1, 2]):
        owner = sequence(1, 4 * len(blocks), 3, blocks)
        item = ScheduledSequence(owner, 4 * len(blocks) - 1, 1, samples=True)
        layout = packer.pack(Batch([item])).layout
        assert layout.block_tables[0, : len(blocks)].tolist() == blocks
        assert layout.write_blocks.tolist() == [blocks[-1]]
        owner.block_table.append(99)  # its owner may change it later; the packer has its own
    again = ScheduledSequence(sequence(1, 4, 3, [9]), 3, 1, samples=True)
    assert packer.pack(Batch([again])).layout.block_tables.tolist() == [[9]]


def test_a_table_that_could_not_be_written_is_not_taken_for_known() -> None:
    """Which would let a sequence read and write another one's blocks."""
    packer = Packer(BLOCK_SIZE, torch.device("cpu"))
    packer.pack(Batch([ScheduledSequence(sequence(1, 3, 0, [7]), 2, 1, samples=True)]))
    broken = Batch([ScheduledSequence(sequence(2, 3, 0, [2**70]), 2, 1, samples=True)])
    for _ in range(2):
        with pytest.raises(OverflowError):
            packer.pack(broken)


def test_a_sequence_without_a_slot() -> None:
    homeless = sequence(4, 2, 0, [0])
    homeless.slot = None
    with pytest.raises(ValueError, match="sequence 4 is in a batch without a slot"):
        Packer(BLOCK_SIZE, torch.device("cpu")).pack(
            Batch([ScheduledSequence(homeless, 0, 2, samples=True)])
        )
