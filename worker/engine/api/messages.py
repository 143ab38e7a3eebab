"""The interface between a worker and any engine, and the plain messages between them.

An engine lives in one thread, and only that thread drives it: `add` and `abort` are called between
steps, and `step` does one step and returns its result. Nothing here knows of Redis, asyncio or
torch, so an engine could also live in its own process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from promptq.shared.protocol.events import TokenLogprob
from promptq.shared.protocol.request import FinishReason, Pooling, SamplingParams
from promptq.worker.engine.api.grammar import Grammar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LEAST = -9999.0
"""Used instead of minus infinity, which JSON does not have (the same value as in vLLM)."""


@dataclass(slots=True)
class EngineRequest:
    """One attempt at a request, tokenised and checked against the engine's limits."""

    sequence_id: int
    """Chosen by the worker. Each attempt at a request has a new id."""

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Randomness is a function of (seed, position) alone."""

    max_tokens: int
    """The most output tokens over all attempts, so that prompt and output fit the model length."""

    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence: the model's (unless ignore_eos) and the request's."""

    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output (the tokenised `bad_words`)."""

    output_token_ids: list[int] = field(default_factory=list)
    """Tokens that earlier attempts emitted. Generation continues after them."""

    priority: int = 0
    """Only this decides which sequence may preempt which. Lower is more urgent."""

    order: tuple[float, str] = (0.0, "")
    """Queue score and request id: the order of waiting sequences."""

    cache_salt: str = ""
    """Only sequences with the same salt share cached prefixes."""

    tenant: str = ""
    """Only sequences of the same tenant share cached prefixes, unless all tenants share them."""

    weight: float = 1.0
    """A tenant with a larger weight may have more of the slots and of the KV cache than others."""

    grammar: Grammar | None = None
    """Grammar of the output, in the state after `output_token_ids`. Once the request is added, only
    the engine uses the grammar. This is the only field that is not plain data."""

    pooling: Pooling | None = None
    """How to pool the prompt's hidden states into a vector. If set, nothing is generated."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the engine still has to report the prompt's log-probabilities, with the first
        token."""
        return self.params.prompt_logprobs is not None and not self.output_token_ids

    @property
    def looks_back(self) -> bool:
        """Whether earlier tokens influence the choice of the next one beyond the logits."""
        return bool(self.params.has_penalties or self.bad_token_sequences or self.grammar)

    @property
    def needs_last_token(self) -> bool:
        """Whether the engine's thread must know the last token before the next one is chosen.
        Penalties do not need this, because they are counted on the device."""
        return self.grammar is not None or any(len(bad) > 1 for bad in self.bad_token_sequences)

    @property
    def bounds_choice(self) -> bool:
        """Whether the request itself forbids some tokens."""
        return bool(self.grammar or self.bad_token_sequences or self.params.logit_bias)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural log-probabilities of P successive tokens of a prompt, and of the N likeliest tokens
    at the position of each. The fields are arrays, because P may be large."""

    logprobs: npt.NDArray[np.float32]  # [P]
    ranks: npt.NDArray[np.int64]  # [P], from 1
    top_ids: npt.NDArray[np.int64]  # [P, N], likeliest first
    top_logprobs: npt.NDArray[np.float32]  # [P, N]

    def __len__(self) -> int:
        return len(self.logprobs)


@dataclass(slots=True)
class SequenceOutput:
    """The output of one step for one sequence.

    `finish_reason` is set on the last output of a sequence, and `error` goes with
    FinishReason.ERROR. By the time this last output is returned, the slot and blocks are free.
    """

    sequence_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[PromptLogprobs] | None = None
    """Set with the first token of all attempts, if the request wants them. Together, the pieces
    cover the prompt from its second token on."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_refused: bool = False
    """Set with `error` if the request itself left no token to choose."""
    timing: SequenceTiming | None = None
    """Set with the first token of this attempt, after a preemption, and with the last output."""
    embedding: npt.NDArray[np.float32] | None = None
    """[embedding_size]: the pooled hidden states, not normalised. Set on the last output if the
    request has `pooling`."""
    given_back: GivenBack | None = None
    """Set if the sequence left before its end, so that its request goes back to the queue."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """Why an engine gives a sequence back before its end."""

    reason: str
    is_blamed: bool = True
    """Whether this counts as a crash of the request. A request that crashes too often ends."""
    delay_ms: int | None = None
    """Time before the next attempt; None: no wait. Set only if `is_blamed` is false."""


@dataclass(slots=True)
class SequenceTiming:
    """Times and counts of a sequence. Times are `time.monotonic()` in seconds, None if not
    reached."""

    scheduled_at: float | None = None
    first_token_at: float | None = None
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the sequence was first scheduled. Only tokens
    that the tenant had sent before count."""
    recomputed_tokens: int = 0
    preemptions: int = 0
    preempted_at: list[float] = field(default_factory=list)
    resumed_at: list[float] = field(default_factory=list)

    def copy(self) -> SequenceTiming:
        """Returns a copy that its sequence no longer changes."""
        return replace(self, preempted_at=[*self.preempted_at], resumed_at=[*self.resumed_at])


@dataclass(slots=True)
class EngineStats:
    """A snapshot. Counts of tokens and sequences are totals since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks with an owner. Cached blocks without an owner do not count."""
    num_saved_blocks: int = 0
    """Number of further blocks that sequences would need if they shared no prefixes."""
    num_cached_blocks: int = 0
    """Blocks without an owner that still hold a reusable prefix."""
    num_steps: int = 0
    num_processed: int = 0
    """Sequences that ended in any way."""
    prompt_tokens: int = 0
    """Prompt tokens computed (cached ones are not computed)."""
    cached_tokens: int = 0
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    """Drafted tokens that were computed along with decodes."""
    accepted_tokens: int = 0
    """Drafted tokens that were right."""
    num_preemptions: int = 0
    step_seconds: float = 0.0
    """Duration of the last step."""
    busy_seconds: float = 0.0
    """Sum of all steps."""


@dataclass(slots=True)
class StepOutput:
    outputs: list[SequenceOutput]
    stats: EngineStats
    ended_at: float = field(default_factory=time.monotonic)
    """`time.monotonic()` in seconds."""


@dataclass(slots=True)
class SequenceSnapshot:
    """The state of one sequence between two steps. `slot` is None for a waiting one."""

    sequence_id: int
    slot: int | None
    num_tokens: int
    """All known tokens: prompt and output."""
    num_computed_tokens: int
    num_blocks: int
    num_shared_blocks: int
    timing: SequenceTiming
    """A copy."""


@dataclass(slots=True)
class EngineSnapshot:
    """All sequences between two steps: running ones by slot, then waiting ones in order."""

    sequences: list[SequenceSnapshot] = field(default_factory=list)
    num_shared_blocks: int = 0
    """Blocks with several owners, each counted once."""
    step_seconds: float = 0.0
    """Median of the last steps."""
    peak_memory_bytes: int = 0
    """Not part of EngineStats, because on CUDA reading it queries the allocator."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The capacity of an engine. A worker claims and checks requests by these limits."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    """Prompt and output together; never more than the KV cache can hold for one sequence."""
    kv_tokens: int
    """Tokens that the whole KV cache holds."""
    block_size: int
    bytes_per_token: int
    """True size of one token's KV: layers x KV heads x (key size + value size) x dtype bytes."""
    vocab_size: int
    embedding_size: int = 0
    """Length of an embedding; 0 if the engine computes none."""
    state_bytes: int = 0
    """Bytes of all states of recurrent layers, also of those kept after shared prefixes."""


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """Features of an engine. A worker refuses other features, and names the field."""

    logprobs: bool = True
    """Whether it reports log-probabilities, with ranks as in the protocol."""
    grammars: bool = True
    """Whether the engine can make the output match a schema."""
    preemption: bool = True
    """Whether a more urgent sequence takes the place of one that runs."""
    preempts_inexact: bool = True
    """Whether a sequence that would not resume exactly may be preempted too."""
    unheeded: frozenset[str] = frozenset()
    """Further fields of a request that the engine would ignore."""
    lowest_temperature: float = 0.0
    """The engine would raise a temperature between 0 and this value to this value."""
    exact_resume: bool = True
    """Whether another attempt continues with exactly the tokens that the first would have emitted.
    If not, a stream still has no gap and no repeat."""
    inexact_with: frozenset[str] = frozenset()
    """Fields of a request with which `exact_resume` does not hold. `temperature` stands for any
    request that is not greedy."""

    head_cost: float | None = None
    """The time of a token that a head of the model drafts, as a share of the time of a step. None:
    the model has no such head."""

    is_at_risk: bool = True
    """Whether a running request may be the cause of an engine's failure."""
    untold: frozenset[str] = frozenset()
    """Fields of `WorkerStats` that the engine cannot report. Their values mean nothing."""

    @property
    def refused(self) -> list[str]:
        """The fields of a request that a worker refuses."""
        logprobs = set() if self.logprobs else {"logprobs"}
        grammars = set() if self.grammars else {"response_format", "tool_choice"}
        return sorted(self.unheeded | logprobs | grammars)

    def may_preempt(self, params: SamplingParams) -> bool:
        """Whether a sequence with these parameters may lose its place to a more urgent one."""
        return self.preemption and (self.preempts_inexact or self.resumes_exactly(params))

    def resumes_exactly(self, params: SamplingParams) -> bool:
        """Whether another attempt at a request with these parameters continues exactly."""
        return self.exact_resume and not self.inexact_fields(params)

    def inexact_fields(self, params: SamplingParams) -> list[str]:
        """Returns the fields because of which such a request would not resume exactly."""
        return sorted(filter(params.is_set, self.inexact_with))
