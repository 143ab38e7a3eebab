"""Plans a step: divides the tokens of the step among sequences."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace

from promptq.worker.engine.core.prefill_pacing import LONG_PROMPT
from promptq.worker.engine.core.sequence import ScheduledSequence, Sequence

_MAX_LOGITS = 2**25
"""The most logits in a step that reports log-probabilities of prompts: 128 MiB in fp32."""


def most_reported_rows(vocab_size: int) -> int:
    """Returns the maximum number of prompt rows for which a step reports log-probabilities."""
    return max(1, _MAX_LOGITS // vocab_size)


@dataclass(slots=True)
class StepPlan:
    """A step that is being planned. A share is a sequence's part of the step's tokens."""

    num_tokens_left: int
    prefill_chunk: int
    long_prompt_chunk: int
    block_size: int
    num_reported_rows_left: int
    keeps_states: bool
    """Whether the model has recurrent layers, so that shared prefixes need kept states."""
    shares: dict[Sequence, ScheduledSequence] = field(default_factory=dict)
    prefilling: set[Sequence] = field(default_factory=set)
    """The sequences in the plan that do not decode."""

    def limit_prompts(self, num_tokens: int | None) -> None:
        """Leave at most `num_tokens` (None: all) for prompts if the plan already has decodes."""
        if self.shares and num_tokens is not None:
            self.num_tokens_left = min(self.num_tokens_left, num_tokens)

    def give(self, sequence: Sequence, start: int | None = None) -> None:
        """Give a sequence a share of the remaining tokens. Does nothing if too few remain.

        `start` is how many of the sequence's tokens will be computed when the running step ends. If
        these are all known tokens, the share has the next token, which is not known yet.
        """
        start = sequence.num_computed_tokens if start is None else start
        uncomputed = max(1, sequence.num_tokens - start)
        num_tokens = min(uncomputed, self.prefill_chunk, self.num_tokens_left)
        has_decodes = len(self.shares) > len(self.prefilling)
        if has_decodes and sequence.num_prompt_tokens > LONG_PROMPT:
            num_tokens = min(num_tokens, self.long_prompt_chunk)
        if start < sequence.keep_after:
            num_tokens = min(num_tokens, sequence.keep_after - start)
        if num_tokens == 0:
            return
        samples = num_tokens == uncomputed and sequence.request.pooling is None
        share = ScheduledSequence(sequence, start, num_tokens, samples)
        num_reported = len(share.reported_rows)
        if (excess := num_reported - self.num_reported_rows_left) > 0:
            num_tokens = share.reported_rows.stop - excess - start
            if num_tokens <= 0:
                return
            num_reported -= excess
            share = replace(share, num_tokens=num_tokens, samples=False)
        self.num_reported_rows_left -= num_reported
        self.shares[sequence] = share
        self.num_tokens_left -= num_tokens
        if uncomputed > 1 and not sequence.decodes:
            self.prefilling.add(sequence)

    def take_back(self, sequence: Sequence) -> None:
        share = self.shares.pop(sequence, None)
        self.prefilling.discard(sequence)
        if share is not None:
            self.num_tokens_left += share.num_tokens
            self.num_reported_rows_left += len(share.reported_rows)

    def computes_next_block(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether another sequence in this plan will compute the next block after this prefix.

        `sequence` should then wait for a step and share the block. Only sequences that make
        progress in this step count, so that no sequence waits for a stalled sequence.
        """
        index = len(prefix)
        if (index + 1) * self.block_size > sequence.num_cacheable_tokens:
            return False  # `sequence` must compute this block itself
        if self.keeps_states:
            return any(self._keeps_for(other, sequence, index) for other in [*self.prefilling])
        block_hash = sequence.block_hashes[index]
        return any(
            index < len(other.block_hashes) and other.block_hashes[index] == block_hash
            for other in self.prefilling
        )

    def _keeps_for(self, other: Sequence, sequence: Sequence, num_shared: int) -> bool:
        """Make `other`, which this plan computes, keep its state after the prefix that both
        sequences have. Later, `sequence` can start from this state. Returns False, and changes
        nothing, if the prefix is already computed, or no longer than `num_shared` blocks."""
        hashes = other.block_hashes, sequence.block_hashes
        most = min(sequence.num_cacheable_tokens // self.block_size, *map(len, hashes))
        # A hash covers all tokens up to its block, so bisection finds the first difference.
        num_equal = bisect_left(range(most), True, key=lambda i: hashes[0][i] != hashes[1][i])
        share, end = self.shares[other], num_equal * self.block_size
        if end <= max(share.start, num_shared * self.block_size):
            return False
        if not share.start < other.keep_after <= end:
            other.keep_after = end
            self.take_back(other)
            self.give(other, share.start)
        return True


def can_plan_next(share: ScheduledSequence) -> bool:
    """Whether the sequence's next share can be planned before `share` has sampled its token."""
    sequence = share.sequence
    return not share.samples or (
        not share.draft
        and sequence.may_end
        and sequence.drafter is None
        and not sequence.request.needs_last_token
    )
