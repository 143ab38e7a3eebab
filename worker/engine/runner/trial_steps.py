"""Dummy batches for warm-up and memory measurement at startup.

A list of shares describes a step. A share has a sequence's context length after the step, and the
sequence's number of rows in the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from promptq.shared.protocol.request import NEUTRAL, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.block_manager import num_blocks_for
from promptq.worker.engine.core.runner import KVLayout
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.recurrent.rows import LONGEST_PIECE

Shares = list[tuple[int, int]]

_FILTERED: dict[str, Any] = {"min_p": 0.01, "top_k": 50, "top_p": 0.9}
_ADJUSTED: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"0": 1.0},
    "min_tokens": 2,
}
MOST_SAMPLING = SamplingParams(**_FILTERED, **_ADJUSTED, logprobs=20, prompt_logprobs=20)
"""All sampling parameters at once, which take the most memory."""
SAMPLING = (
    SamplingParams(temperature=0.0),
    NEUTRAL,
    *(SamplingParams(**{name: value}) for name, value in _FILTERED.items()),
    SamplingParams(**_ADJUSTED),
    SamplingParams(logprobs=1),
    MOST_SAMPLING,
)
"""Sampling parameters, one of each kind. Each kind launches different kernels."""

_ids = count(-2, -1)
"""Ids of dummy sequences. All ids differ, because samplers recognise sequences by id."""


def trial_batch(
    shares: Shares,
    layout: KVLayout,
    params: SamplingParams = NEUTRAL,
    max_reported_rows: int = 0,
    vocab_size: int = 2,
) -> Batch:
    """Returns a batch in which every sequence samples a token. At most `max_reported_rows` rows
    report log-probabilities of prompts. Token ids are below `vocab_size`. The sequences share
    blocks, so a cache of a few blocks is enough for any context."""
    scheduled = []
    for slot, (context, num_rows) in enumerate(shares):
        token_ids = [7919 * place % vocab_size for place in range(context)]
        request = EngineRequest(
            next(_ids),
            token_ids,
            params,
            seed=0,
            max_tokens=1,
            end_token_ids=frozenset({0}),
            bad_token_sequences=((1,), (0, 1)) if params.has_penalties else (),
        )
        sequence = Sequence.of(request)
        num_reported = min(max_reported_rows, num_rows - 1)
        max_reported_rows -= num_reported
        sequence.num_reported_rows = context - 1 - num_reported
        sequence.slot = slot
        sequence.block_table = [
            block % layout.num_blocks for block in range(num_blocks_for(context, layout.block_size))
        ]
        scheduled.append(ScheduledSequence(sequence, context - num_rows, num_rows, samples=True))
    return Batch(scheduled)


def largest_step(num_tokens: int, num_seqs: int, max_context: int) -> Shares:
    """Returns the shares of the step with the most rows and samples: `num_seqs` sequences, with
    `num_tokens` rows in total, and contexts of up to `max_context` tokens."""
    num_seqs = min(num_seqs, num_tokens)
    left = min(num_tokens, num_seqs * max_context)
    shares = []
    for others in reversed(range(num_seqs)):
        num_rows = min(max_context, left - others)
        shares.append((max_context, num_rows))
        left -= num_rows
    return shares


def most_padded_step(num_tokens: int, num_seqs: int, max_context: int) -> Shares:
    """Returns the step for which recurrent layers add the most padding. These layers cut each chunk
    of a prompt into pieces of at most LONGEST_PIECE rows, and pad the pieces."""
    length = min(LONGEST_PIECE + 1, max_context, num_tokens)
    count = min(num_seqs, num_tokens // length)
    left = min(num_tokens - count * length, max_context - length)
    last = length + left // LONGEST_PIECE * LONGEST_PIECE
    return [(length, length)] * (count - 1) + [(last, last)]


def kinds_of_steps(num_tokens: int, num_seqs: int, max_context: int) -> Iterator[Shares]:
    """Yields the shares of steps that together launch all kernel variants of serving.

    Kernels have variants for the longest chunk and for the number of rows or of samples, rounded up
    to a power of two. One of the steps is a single decode, because a tensor with one row may have
    any strides.
    """
    for num_rows in powers_of_two(min(num_tokens, max_context)):
        yield [(num_rows, num_rows)]
        if num_rows < num_tokens and num_seqs > 1:
            yield [(num_rows, 1), (num_rows, num_rows)]
    for num_decodes in powers_of_two(min(num_seqs, num_tokens)):
        yield [(1, 1)] * num_decodes


def powers_of_two(most: int) -> list[int]:
    """Returns all powers of two below `most`, and `most` itself."""
    return [1 << exponent for exponent in range((most - 1).bit_length())] + [most]
