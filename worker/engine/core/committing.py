"""Commits a step: stores the results as tokens, vectors and errors of sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import isfinite

from promptq.shared.protocol.request import FinishReason
from promptq.worker.engine.api.messages import EngineStats, SequenceOutput
from promptq.worker.engine.core.block_manager import BlockManager
from promptq.worker.engine.core.failed_steps import Collected
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence, SequenceStatus


class Committer:
    """Stores the results of each share (a sequence's part of a step), and counts tokens."""

    def __init__(
        self, block_manager: BlockManager, totals: EngineStats, *, has_states: bool
    ) -> None:
        self._block_manager = block_manager
        self._totals = totals
        self._has_states = has_states

    def commit(
        self, batch: Batch, collected: Collected
    ) -> Iterator[tuple[Sequence, SequenceOutput]]:
        """Store the results of a batch, and yield each sequence with its output. If an output has a
        `finish_reason`, the caller must end this sequence before taking the next output."""
        for share, reported in zip(batch.reporting, collected.prompt_logprobs, strict=True):
            share.sequence.num_reported_rows = share.reported_rows.stop
            share.sequence.prompt_logprobs.append(reported)
        num_drafting = sum(1 for share in batch.scheduled if share.draft)
        tokens = iter(collected.sampled)
        for share in batch.scheduled:
            rows = next(tokens) if share.samples else []
            if share.sequence.status is SequenceStatus.FINISHED:
                continue  # the sequence ended after this step was launched
            if not share.samples:
                self._advance(share, share.num_tokens)
                if share.sequence.request.pooling is not None:
                    yield from self._pool(share)
                continue
            output = self._append(share, _accepted(share, rows))
            num_drafted, num_accepted = len(share.draft), max(0, len(output.token_ids) - 1)
            self._totals.drafted_tokens += num_drafted
            self._totals.accepted_tokens += num_accepted
            if (drafter := share.sequence.drafter) is not None:
                if not share.draft:
                    drafter.rest()
                elif share.drafts_by_head:
                    drafter.settle_head(num_drafted, num_accepted)
                else:
                    counts = len(batch.scheduled), num_drafting
                    drafter.settle_lookup(num_drafted, num_accepted, *counts)
            yield share.sequence, output

    def _advance(self, share: ScheduledSequence, num_tokens: int) -> None:
        """Record that the first `num_tokens` tokens of the share are now in the KV cache."""
        sequence, start, end = share.sequence, share.start, share.start + num_tokens
        sequence.num_computed_tokens = end
        self._block_manager.mark_computed(sequence, start, end)
        reached = sequence.num_reached_tokens
        if start < reached:
            num_recomputed = min(end, reached) - start
            sequence.timing.recomputed_tokens += num_recomputed
            self._totals.recomputed_tokens += num_recomputed
        if end > reached:
            sequence.num_reached_tokens = end
            num_new_of_prompt = min(end, sequence.num_prompt_tokens) - max(start, reached)
            self._totals.prompt_tokens += max(0, num_new_of_prompt)

    def _append(self, share: ScheduledSequence, tokens: list[SampledToken]) -> SequenceOutput:
        sequence = share.sequence
        if tokens[0].error is not None:
            output = failed(sequence, tokens[0].error)
            output.is_refused = sequence.request.bounds_choice
            return output
        prompt_logprobs = None
        if sequence.num_output_tokens == 0 and sequence.request.wants_prompt_logprobs:
            prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        finish_reason, num_appended = None, 0
        while finish_reason is None and num_appended < len(tokens):
            sequence.token_ids.append(tokens[num_appended].token_id)
            num_appended += 1
            finish_reason = _finish_reason(sequence)
        # States do not include drafted tokens: the next step computes the accepted ones again.
        num_accepted = 0 if self._has_states else num_appended - 1
        self._advance(share, share.num_tokens + num_accepted)
        grammar = sequence.request.grammar
        if grammar is not None and finish_reason is not FinishReason.STOP:
            try:
                grammar.accept(sequence.token_ids[-1])
            except Exception as error:  # one failure must not stop other sequences
                return failed(sequence, str(error))
            if grammar.is_complete:
                finish_reason = FinishReason.STOP
        self._totals.generation_tokens += num_appended
        sequence.num_shortages = 0
        timing, reported_timing = sequence.timing, None
        is_first = timing.first_token_at is None
        if is_first:
            timing.first_token_at = time.monotonic()
        is_new = is_first or timing.preemptions > sequence.num_reported_preemptions
        if is_new and finish_reason is None:  # a last output gets the timing without a copy
            sequence.num_reported_preemptions = timing.preemptions
            reported_timing = timing.copy()
        logprobs = [token.logprob for token in tokens[:num_appended] if token.logprob is not None]
        return SequenceOutput(
            sequence.sequence_id,
            sequence.token_ids[-num_appended:],
            logprobs=logprobs or None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            timing=reported_timing,
        )

    def _pool(self, share: ScheduledSequence) -> Iterator[tuple[Sequence, SequenceOutput]]:
        """Add a share's hidden states to the sequence's vector. If complete, yield the vector."""
        sequence = share.sequence
        if share.start == 0:
            sequence.pool.clear()  # preempted, so it starts again
        if share.states is not None:
            sequence.pool.add(share.states)
        if sequence.num_uncomputed_tokens:
            return
        vector = sequence.pool.mean()
        if all(map(isfinite, vector)):
            output = SequenceOutput(
                sequence.sequence_id, [], finish_reason=FinishReason.STOP, embedding=vector
            )
        else:
            output = failed(
                sequence,
                "its hidden states are not finite: a weight is not finite (fetch the model's files"
                " again), or they overflow in the model's dtype (try bfloat16 or float32)",
            )
        yield sequence, output


def _finish_reason(sequence: Sequence) -> FinishReason | None:
    if sequence.may_end and sequence.token_ids[-1] in sequence.request.end_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_tokens >= sequence.max_num_tokens else None


def _accepted(share: ScheduledSequence, sampled: list[SampledToken]) -> list[SampledToken]:
    """Returns the sampled tokens that the sequence keeps: the first, and each later one if all
    drafted tokens before it were right. Leaves out a later token whose sampling failed. The next
    step samples this token first, and ends the request if the sampling fails again."""
    num_accepted = 1
    for drafted, token, following in zip(share.draft, sampled, sampled[1:], strict=False):
        if token.token_id != drafted or following.error is not None:
            break
        num_accepted += 1
    return sampled[:num_accepted]


def failed(sequence: Sequence, error: str) -> SequenceOutput:
    return SequenceOutput(sequence.sequence_id, [], finish_reason=FinishReason.ERROR, error=error)
