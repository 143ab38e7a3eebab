"""Requests for an engine, and its steps to their end."""

from __future__ import annotations

from itertools import count
from typing import Any

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest, SequenceOutput
from promptq.worker.engine.core.block_manager import BlockManager
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.scheduler import Scheduler
from promptq.worker.engine.core.sequence import Batch, Sequence

PARAMS = SamplingParams()


def make_request(sequence_id: int, prompt: list[int] | int = 5, **fields: Any) -> EngineRequest:
    """A request with a prompt of its own of that length, or with that very prompt."""
    if isinstance(prompt, int):
        prompt = [(sequence_id * 7 + index) % 256 for index in range(prompt)]
    return EngineRequest(
        sequence_id,
        prompt,
        fields.pop("params", PARAMS),
        seed=fields.pop("seed", sequence_id),
        max_tokens=fields.pop("max_tokens", 10),
        order=fields.pop("order", (float(sequence_id), str(sequence_id))),
        **fields,
    )


def run_to_end(engine: LLMEngine) -> dict[int, tuple[list[int], SequenceOutput]]:
    """Step until idle, auditing each time: tokens and last output of every sequence."""
    tokens: dict[int, list[int]] = {}
    last: dict[int, SequenceOutput] = {}
    while engine.has_work:
        assert engine.stats.num_steps < 5000, "it does not come to an end"
        for output in engine.step().outputs:
            assert output.sequence_id not in last, "an output after the last one"
            tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                last[output.sequence_id] = output
        engine.check_integrity()
    assert tokens.keys() == last.keys()
    return {sequence_id: (tokens[sequence_id], last[sequence_id]) for sequence_id in last}


BLOCK = 4

_ids = count(1)


def make_scheduler(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    prefill_chunk: int = 64,
    num_blocks: int = 50,
) -> Scheduler:
    manager = BlockManager(num_blocks, BLOCK)
    return Scheduler(max_num_seqs, max_num_batched_tokens, prefill_chunk, manager)


def make_sequence(
    num_tokens: int,
    *,
    priority: int = 0,
    score: float | None = None,
    tokens: list[int] | None = None,
    tenant: str = "",
    weight: float = 1.0,
) -> Sequence:
    """A sequence like no other, unless its tokens are given; later ones queue behind."""
    sequence_id = next(_ids)
    return Sequence.of(
        EngineRequest(
            sequence_id,
            tokens or [sequence_id * 1000 + index for index in range(num_tokens)],
            SamplingParams(),
            seed=0,
            max_tokens=1000,
            priority=priority,
            order=(float(sequence_id) if score is None else score, str(sequence_id)),
            tenant=tenant,
            weight=weight,
        )
    )


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


def shares(batch: Batch) -> list[tuple[Sequence, int]]:
    return [(share.sequence, share.num_tokens) for share in batch.scheduled]


def commit(scheduler: Scheduler, batch: Batch) -> None:
    """Note that a batch was computed; each sequence that samples gains a token."""
    for share in batch.scheduled:
        end = share.start + share.num_tokens
        share.sequence.num_computed_tokens = end
        scheduler.block_manager.mark_computed(share.sequence, share.start, end)
        if share.samples:
            share.sequence.token_ids.append(7)


def step(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """Schedule and commit as the engine does, every sample giving one token."""
    batch = scheduler.schedule()
    commit(scheduler, batch)
    scheduler.check_integrity()
    scheduler.block_manager.check_integrity(scheduler.running)
    return shares(batch)
