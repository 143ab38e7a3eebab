"""Computes a failed step again, as a whole and then in parts, to find the sequence that fails.

Nothing of a failed step was committed. Computing a share (a sequence's part of the step) again
writes the same K and V, and begins with the same states of recurrent layers. So a step can be
computed any number of times. To find one failing sequence of n takes about 2 log2(n) computations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from traceback import clear_frames
from typing import Any, NamedTuple

from promptq.shared.protocol.request import NEUTRAL
from promptq.worker.engine.api.messages import EngineRequest, PromptLogprobs, SequenceOutput
from promptq.worker.engine.core.runner import Runner, SampledToken
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence

_PROBE_ID = -2
_LONGEST_REASON = 500
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. On a CPU, only the text of torch's RuntimeError shows that."""
    return isinstance(error, MemoryError) or any(
        words in str(error).lower() for words in _OUT_OF_MEMORY
    )


class Collected(NamedTuple):
    """The results of a batch: `sampled` has a list for each share in `batch.sampling`, and
    `prompt_logprobs` has an entry for each share in `batch.reporting`."""

    sampled: list[list[SampledToken]]
    prompt_logprobs: list[PromptLogprobs]


def collect(runner: Runner, batch: Batch, launched: Any) -> Collected:
    """Returns the results of a launched batch. Raises RuntimeError if the runner returned a wrong
    number of tokens or of log-probabilities."""
    sampled = runner.collect(launched)
    counts, wanted = [*map(len, sampled)], [share.num_samples for share in batch.sampling]
    if counts != wanted:
        raise RuntimeError(f"the runner sampled {counts} tokens instead of {wanted}")
    if not (reporting := batch.reporting):
        return Collected(sampled, [])
    reported = runner.prompt_logprobs(launched)
    counts, wanted = [*map(len, reported)], [len(share.reported_rows) for share in reporting]
    if counts != wanted:
        raise RuntimeError(f"the runner reported {counts} tokens instead of {wanted}")
    return Collected(sampled, reported)


class StepRecovery:
    """Computes the shares of a step that failed.

    `commit` stores the results of a batch and returns outputs. `leave` removes a sequence and
    returns the sequence's last output. The second argument of `leave` is the error message, or None
    to give the sequence back. If memory was short even for a single sequence, `set_back` makes this
    sequence wait, and returns whether the sequence will be tried again.
    """

    def __init__(
        self,
        runner: Runner,
        commit: Callable[[Batch, Collected], list[SequenceOutput]],
        leave: Callable[[Sequence, str | None], SequenceOutput],
        set_back: Callable[[Sequence], bool],
    ) -> None:
        self._runner = runner
        self._commit = commit
        self._leave = leave
        self._set_back = set_back

    def compute(self, shares: list[ScheduledSequence]) -> list[SequenceOutput]:
        """Compute and commit shares, in smaller parts after a failure. Returns the outputs.

        If a sequence also fails alone, the sequence ends with an error. If a sequence fails alone
        for lack of memory, the sequence instead waits or returns to the queue, as memory may become
        free. Raises the runner's exception if the runner can no longer compute even a harmless
        batch.
        """
        batch = Batch(shares)
        try:
            collected = self._compute(batch)
        except Exception as error:
            failure = error
            clear_frames(error.__traceback__)  # the frames hold memory that the parts need
        else:
            return self._commit(batch, collected)
        if parts := _in_parts(shares, failure):
            return [output for part in parts for output in self.compute(part)]
        sequence, was_short = shares[0].sequence, is_out_of_memory(failure)
        if was_short and self._set_back(sequence):
            return []
        if not self._still_works(sequence):
            raise failure
        reason = f"the engine cannot compute it: {failure}"
        return [self._leave(sequence, None if was_short else reason[:_LONGEST_REASON])]

    def _compute(self, batch: Batch) -> Collected:
        return collect(self._runner, batch, self._runner.launch(batch))

    def _still_works(self, failed: Sequence) -> bool:
        """Whether the runner can compute a harmless batch in place of a failed sequence."""
        try:
            sampled = self._compute(_probe(failed)).sampled
        except Exception:
            return False
        return sampled[0][0].error is None


def _in_parts(shares: list[ScheduledSequence], error: Exception) -> list[list[ScheduledSequence]]:
    """Returns the parts to try after shares failed with `error`; empty if nothing smaller is left.
    Several shares are cut into halves. A single share is tried without its draft. If memory is
    still short, the share is tried with half of its tokens, and later steps compute the rest."""
    if len(shares) > 1:
        half = len(shares) // 2
        return [shares[:half], shares[half:]]
    (share,) = shares
    if share.draft:
        return [[replace(share, draft=())]]
    if share.num_tokens > 1 and is_out_of_memory(error):
        return [[replace(share, num_tokens=share.num_tokens // 2, samples=False)]]
    return []


def _probe(failed: Sequence) -> Batch:
    """Returns a batch with a one-token prompt, in the slot and the last block of a failed sequence.
    The last block is for a token that is not computed yet, so no other sequence uses it."""
    sequence = Sequence.of(EngineRequest(_PROBE_ID, [0], NEUTRAL, seed=0, max_tokens=1))
    sequence.slot = failed.slot
    sequence.block_table = failed.block_table[-1:]
    return Batch([ScheduledSequence(sequence, start=0, num_tokens=1, samples=True)])
