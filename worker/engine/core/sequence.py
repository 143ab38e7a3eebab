"""The engine's basic types: a sequence, and the batch of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from promptq.worker.engine.api.messages import EngineRequest, PromptLogprobs, SequenceTiming
from promptq.worker.engine.core.drafting import MAX_ROWS, Drafter
from promptq.worker.engine.core.pooling import Pool

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt at a request inside the engine.

    The KV cache has the first `num_computed_tokens` of `token_ids`. A sequence has no phases: the
    scheduler gives a sequence work while some of its known tokens are not computed. A step that
    computes the last known token samples the next token, or ends a sequence whose request is for a
    vector.
    """

    request: EngineRequest
    token_ids: list[int]  # prompt, then output; engine appends
    max_num_tokens: int  # prompt and output together
    timing: SequenceTiming
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0  # engine, after each step
    num_reached_tokens: int = 0  # the most ever computed; a preemption does not lower it
    slot: int | None = None  # scheduler, from admission to exit
    block_table: list[int] = field(default_factory=list)  # block manager
    block_hashes: list[bytes] = field(default_factory=list)  # block manager; of full blocks
    keep_after: int = 0  # block manager; after these first tokens, recurrent layers keep a state
    state_target: int | None = None  # block manager; the place for that state
    state_source: int | None = None  # block manager; the place of the state to begin with
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # engine; in order
    num_reported_rows: int = 0  # engine; the number of first rows that have reported
    num_rows_to_report: int = 0  # all of the prompt but the last; 0 if the request wants none
    drafter: Drafter | None = None  # engine, if tokens may be drafted
    pool: Pool = field(default_factory=Pool)  # engine, if the request is for a vector
    num_shortages: int = 0  # engine; failures for lack of memory since the last token
    num_reported_preemptions: int = 0  # engine; preemptions that an output has reported
    order: tuple[Any, ...] = ()  # sort key: the queue's order
    urgency: tuple[Any, ...] = ()  # sort key: most urgent first; the last is preempted first

    @classmethod
    def of(cls, request: EngineRequest, max_model_len: int | None = None) -> Sequence:
        limit = len(request.prompt_token_ids) + request.max_tokens
        order = (request.order, request.sequence_id)
        return cls(
            request=request,
            token_ids=[*request.prompt_token_ids, *request.output_token_ids],
            max_num_tokens=limit if max_model_len is None else min(limit, max_model_len),
            timing=SequenceTiming(),
            order=order,
            urgency=(request.priority, *order),
            num_rows_to_report=(
                len(request.prompt_token_ids) - 1 if request.wants_prompt_logprobs else 0
            ),
        )

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens of all attempts together."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def decodes(self) -> bool:
        """Whether the tokens that are left to compute are a decode (see `is_decode`)."""
        return self.is_decode(self.num_computed_tokens, self.num_uncomputed_tokens)

    def is_decode(self, start: int, num_tokens: int) -> bool:
        """Whether computing `num_tokens` tokens from `start` on is a decode: one token of any kind,
        or a few output tokens. A model with recurrent layers computes the drafts that were accepted
        in the last step again, which makes several output tokens."""
        return num_tokens <= (1 if start < self.num_prompt_tokens else MAX_ROWS)

    @property
    def num_cacheable_tokens(self) -> int:
        """Number of first tokens that need not be computed if their KV is cached. Hidden states and
        logits are not cached. So the last token is always computed, and so are prompt tokens whose
        log-probabilities are still to be reported. If the mean of all hidden states is wanted, all
        tokens are computed."""
        if self.request.pooling == "mean":
            return 0
        all_reported = self.num_reported_rows >= self.num_rows_to_report
        return self.num_tokens - 1 if all_reported else self.num_reported_rows

    @property
    def may_end(self) -> bool:
        """Whether an end token would end the sequence now."""
        return self.num_output_tokens >= self.request.params.min_tokens


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence's share (part) of one step: `num_tokens` tokens from `start` on, then those of
    `draft`."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether the step computes the last known token and samples the next token."""
    draft: tuple[int, ...] = ()
    """Drafted tokens after the known ones. The step also samples after each of them. At launch, the
    model's head chooses the tokens that are UNKNOWN."""
    drafts_by_head: bool = False
    """Whether the tokens of `draft` come from the model's head."""
    feeds_head: bool = False
    """Whether the head needs this step's hidden states, because the head may draft in the next
    steps."""
    states: npt.NDArray[np.float32] | None = None
    """Hidden states [num_pooled, hidden size]. The runner sets this when it collects the step."""

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.draft)

    @property
    def num_ahead(self) -> int:
        """Number of unknown tokens in the share: 1 if the previous step is still sampling the token
        of this share, otherwise 0 or less."""
        return self.start + self.num_tokens - self.sequence.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the share's rows: known tokens, then drafted ones."""
        known = self.sequence.token_ids[self.start : self.start + self.num_tokens]
        return [*known, *self.draft]

    @property
    def reported_rows(self) -> range:
        """Positions whose rows report the log-probability of the next prompt token."""
        sequence, start = self.sequence, self.start
        if start >= sequence.num_rows_to_report:
            return range(0)
        end = min(start + self.num_tokens, sequence.num_rows_to_report)
        return range(max(start, sequence.num_reported_rows), end)

    @property
    def num_pooled(self) -> int:
        """Number of rows, at the end of the share, whose hidden states are pooled into a vector."""
        match self.sequence.request.pooling:
            case "mean":
                return self.num_tokens
            case "last":
                return int(self.start + self.num_tokens == self.sequence.num_tokens)
        return 0

    @property
    def num_samples(self) -> int:
        """Number of rows, at the end of the share, that sample one token each."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(slots=True)
class Batch:
    """The work of one step."""

    scheduled: list[ScheduledSequence]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all shares, without drafted tokens."""
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def drafts(self) -> list[tuple[int, bool]] | None:
        for item in self.scheduled:
            if item.num_tokens > 1 and not item.sequence.is_decode(item.start, item.num_tokens):
                return None
        return [(len(item.draft), item.drafts_by_head) for item in self.scheduled if item.draft]

    @property
    def reporting(self) -> list[ScheduledSequence]:
        return [item for item in self.scheduled if item.reported_rows]

    @property
    def sampling(self) -> list[ScheduledSequence]:
        return [item for item in self.scheduled if item.samples]


def slot_of(sequence: Sequence) -> int:
    """Returns the slot of a sequence in a batch. Raises ValueError if the sequence has none."""
    if sequence.slot is None:
        raise ValueError(f"sequence {sequence.sequence_id} is in a batch without a slot")
    return sequence.slot
