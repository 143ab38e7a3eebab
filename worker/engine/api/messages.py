"""The plain messages between a worker and any engine.

An engine runs in one thread, and only this thread calls the engine. Each call of `step` computes
one step and returns the result. The thread calls `add` and `abort` only between steps. Nothing here
imports Redis, asyncio or torch, so an engine could also run in a separate process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from promptq.shared.protocol.events import TokenLogprob
from promptq.shared.protocol.request import FinishReason, Pooling, SamplingParams
from promptq.worker.engine.api.grammar import Grammar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LEAST = -9999.0
"""JSON has no minus infinity, so this log-probability replaces it. vLLM uses the same number."""


@dataclass(slots=True)
class EngineRequest:
    """One attempt at a request, tokenised and checked against the engine's limits."""

    sequence_id: int
    """An id that the worker chooses. Each attempt at a request has a new id."""

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """The random numbers of the sequence depend only on this seed and the token's position."""

    max_tokens: int
    """The most output tokens of all attempts together. Prompt and output together fit the model."""

    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence: the model's (unless ignore_eos) and the request's."""

    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output (the tokenised `bad_words`)."""

    output_token_ids: list[int] = field(default_factory=list)
    """Tokens that earlier attempts emitted. This attempt continues after them."""

    priority: int = 0
    """Lower is more urgent. A sequence never preempts a more urgent sequence."""

    order: tuple[float, str] = (0.0, "")
    """Queue score and request id, by which waiting sequences are sorted."""

    cache_salt: str = ""
    """Only sequences with the same salt share cached prefixes."""

    tenant: str = ""
    """Only sequences of one tenant share cached prefixes, unless `share_prefix_cache` is set."""

    weight: float = 1.0
    """The tenant's weight. A tenant with a larger weight may have more slots and more KV cache."""

    grammar: Grammar | None = None
    """Grammar of the output, in the state after `output_token_ids`. Once the request is added, only
    the engine uses the grammar. This is the only field that is not plain data."""

    pooling: Pooling | None = None
    """How to pool the prompt's hidden states into a vector. If set, nothing is generated."""

    pair: tuple[str, str] | None = None
    """A query and a document. The vector is the document's score for the query."""

    pictures: tuple[str, ...] = ()
    """Data URLs of the pictures. The prompt has one placeholder token for each picture."""

    picture_tokens: int = 0
    """Tokens that pictures add to `prompt_token_ids`: an estimate until an engine counts them."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.picture_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the engine must report the prompt's log-probabilities with the first token. An
        attempt that continues an output does not report the log-probabilities again."""
        return self.params.prompt_logprobs is not None and not self.output_token_ids

    @property
    def looks_back(self) -> bool:
        """Whether penalties, bad words or a grammar make the choice of a token depend on earlier
        output tokens."""
        return bool(self.params.has_penalties or self.bad_token_sequences or self.grammar)

    @property
    def needs_last_token(self) -> bool:
        """Whether the engine's thread must know the last token before the next token is chosen.
        Penalties do not need this token, because the device counts the tokens for them."""
        return self.grammar is not None or any(len(bad) > 1 for bad in self.bad_token_sequences)

    @property
    def bounds_choice(self) -> bool:
        """Whether the request can forbid tokens: by a grammar, bad words or a logit bias."""
        return bool(self.grammar or self.bad_token_sequences or self.params.logit_bias)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural log-probabilities of P successive prompt tokens, and of the N likeliest tokens at
    each of these positions. The fields are arrays, because P may be large."""

    logprobs: npt.NDArray[np.float32]  # [P]
    ranks: npt.NDArray[np.int64]  # [P], from 1
    top_ids: npt.NDArray[np.int64]  # [P, N], likeliest first
    top_logprobs: npt.NDArray[np.float32]  # [P, N]

    def __len__(self) -> int:
        return len(self.logprobs)


@dataclass(slots=True)
class SequenceOutput:
    """The output of one step for one sequence.

    The last output of a sequence has a `finish_reason`. If the reason is FinishReason.ERROR, the
    output also has an `error`. The engine frees the slot and the blocks before returning the last
    output.
    """

    sequence_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[PromptLogprobs] | None = None
    """Log-probabilities of all prompt tokens except the first, in successive parts. Set only with
    the request's first output token, and only if `wants_prompt_logprobs`."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_refused: bool = False
    """Whether the request caused the `error`: the request forbids every token, or the engine cannot
    read its pictures."""
    timing: SequenceTiming | None = None
    """Set with the attempt's first token, with the first token after a preemption, and in the last
    output."""
    embedding: npt.NDArray[np.float32] | None = None
    """Pooled hidden states [embedding_size], not normalised. Set in the last output if the request
    has `pooling`."""
    given_back: GivenBack | None = None
    """Set if the engine stops the sequence before its end, to return its request to the queue."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """Why an engine stops a sequence before its end and returns its request to the queue."""

    reason: str
    is_blamed: bool = True
    """Whether the stop counts as a crash of the request. A request that crashes too often ends."""
    delay_ms: int | None = None
    """Milliseconds before the next attempt; None: no delay. Set only if `is_blamed` is false."""


@dataclass(slots=True)
class SequenceTiming:
    """Times and counts of a sequence. Times are seconds of `time.monotonic()`; None at first."""

    scheduled_at: float | None = None
    first_token_at: float | None = None
    prompt_tokens: int | None = None
    """Number of prompt tokens. Set only if the engine has turned pictures into tokens."""
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache when the sequence was first scheduled.
    Counts only tokens that the same tenant had already sent."""
    recomputed_tokens: int = 0
    preemptions: int = 0
    preempted_at: list[float] = field(default_factory=list)
    resumed_at: list[float] = field(default_factory=list)

    def copy(self) -> SequenceTiming:
        """Returns a copy that later steps of the sequence do not change."""
        return replace(self, preempted_at=[*self.preempted_at], resumed_at=[*self.resumed_at])


@dataclass(slots=True)
class EngineStats:
    """Statistics of an engine. Counts of tokens and ended sequences are totals since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks that sequences own. Cached blocks without an owner do not count."""
    num_saved_blocks: int = 0
    """Number of further blocks that the sequences would need if they shared no prefixes."""
    num_cached_blocks: int = 0
    """Blocks without an owner whose content can be reused as a prefix."""
    num_steps: int = 0
    num_processed: int = 0
    """Number of sequences that have ended, for any reason."""
    prompt_tokens: int = 0
    """Prompt tokens that were computed. Cached tokens do not count."""
    cached_tokens: int = 0
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    """Drafted tokens that were computed together with decodes."""
    accepted_tokens: int = 0
    """Drafted tokens that were accepted."""
    num_preemptions: int = 0
    step_seconds: float = 0.0
    """Duration of the last step, in seconds."""
    busy_seconds: float = 0.0
    """Duration of all steps together, in seconds."""
    max_running: int | None = None
    """The most sequences that the engine runs now; None: only the slots limit them."""
    holds_back: str = ""
    """Why `max_running` is set."""


@dataclass(slots=True)
class StepOutput:
    outputs: list[SequenceOutput]
    stats: EngineStats
    ended_at: float = field(default_factory=time.monotonic)
    """When the step ended, in seconds of `time.monotonic()`."""


@dataclass(slots=True)
class SequenceSnapshot:
    """The state of one sequence between two steps. `slot` is None for a waiting sequence."""

    sequence_id: int
    slot: int | None
    num_tokens: int
    """Number of known tokens: prompt and output so far."""
    num_computed_tokens: int
    num_blocks: int
    num_shared_blocks: int
    timing: SequenceTiming
    """A copy of the sequence's timing."""


@dataclass(slots=True)
class EngineSnapshot:
    """All sequences between two steps: running ones by slot, then waiting ones in queue order."""

    sequences: list[SequenceSnapshot] = field(default_factory=list)
    num_shared_blocks: int = 0
    """Blocks with several owners, each counted once."""
    step_seconds: float = 0.0
    """Median duration of the last steps, in seconds."""
    peak_memory_bytes: int = 0
    """The most device memory used. Not in EngineStats: reading it queries CUDA's allocator."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The capacity of an engine. A worker claims and checks requests by these limits."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    """The most tokens of a sequence, prompt and output together. The KV cache can hold all of
    them."""
    kv_tokens: int
    """Number of tokens that the whole KV cache can hold."""
    block_size: int
    bytes_per_token: int
    """Bytes of one token's KV: layers x KV heads x (key size + value size) x dtype bytes."""
    vocab_size: int
    embedding_size: int = 0
    """Length of an embedding; 0 if the engine computes no embeddings."""
    state_bytes: int = 0
    """Bytes of all states of recurrent layers, including the states kept after shared prefixes."""


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """Features of an engine. A worker refuses fields of requests that need missing features."""

    logprobs: bool = True
    """Whether the engine reports log-probabilities, with ranks as in the protocol."""
    generates: bool = True
    """Whether the engine generates tokens. If not, it only computes vectors, with one pooling."""
    normalizes: bool = False
    """Whether all vectors have the length 1."""
    scores: bool = False
    """Whether the engine scores documents for a query."""
    grammars: bool = True
    """Whether the engine can make the output match a schema."""
    pictures: bool = False
    """Whether the engine reads pictures."""
    preemption: bool = True
    """Whether a more urgent sequence preempts a running one."""
    preempts_inexact: bool = True
    """Whether the engine may also preempt a sequence that would not resume exactly."""
    unheeded: frozenset[str] = frozenset()
    """Further request fields that the engine ignores. Workers refuse requests with these fields."""
    lowest_temperature: float = 0.0
    """The engine raises a temperature between 0 and this value to this value."""
    exact_resume: bool = True
    """Whether another attempt continues with exactly the tokens that an undisturbed attempt would
    emit. If false, a stream still has no gap and no repeated token."""
    inexact_with: frozenset[str] = frozenset()
    """A request that sets one of these fields cannot resume exactly. A `temperature` of 0 counts as
    not set."""
    most_biases: int | None = None
    """The most tokens whose logits the engine can bias. In a later attempt, biases take the place
    of the presence and frequency penalties of earlier output. A `repetition_penalty` would scale
    the biases, so the attempt is then not exact. None: the engine continues penalties without
    biases."""

    head_work: float | None = None
    """The work of the model's drafting head for a token, as a fraction of the model's. None: the
    model has no drafting head."""

    is_at_risk: bool = True
    """Whether a running request may be the cause of an engine failure."""
    unreported: frozenset[str] = frozenset()
    """Fields of `WorkerStats` that the engine cannot report. Workers ignore their values."""

    @property
    def refused(self) -> list[str]:
        """Request fields that a worker refuses."""
        logprobs = set() if self.logprobs else {"logprobs"}
        grammars = set() if self.grammars else {"response_format", "tool_choice"}
        pictures = set() if self.pictures else {"pictures"}
        scores = set() if self.scores else {"scores"}
        return sorted(self.unheeded | logprobs | grammars | pictures | scores)

    def may_preempt(self, params: SamplingParams, output: Sequence[int]) -> bool:
        """Whether the engine may preempt a sequence with these parameters and this output so
        far."""
        return self.preemption and (self.preempts_inexact or self.resumes_exactly(params, output))

    def resumes_exactly(self, params: SamplingParams, output: Sequence[int] = ()) -> bool:
        """Whether another attempt at a request with these parameters continues `output` exactly."""
        return self.exact_resume and not self.inexact_fields(params, output)

    def inexact_fields(self, params: SamplingParams, output: Sequence[int] = ()) -> list[str]:
        """Returns the fields that keep another attempt from continuing `output` exactly."""
        inexact = {*filter(params.is_set, self.inexact_with)}
        if 0.0 < params.temperature < self.lowest_temperature:
            inexact.add("temperature")  # a choice among draws, which another attempt cannot repeat
        penalties = {*filter(params.is_set, ("frequency_penalty", "presence_penalty"))}
        if penalties and self.most_biases is not None:
            num_biases = len({*output, *map(int, params.logit_bias or ())})
            if params.is_set("repetition_penalty") or num_biases > self.most_biases:
                inexact |= penalties
        return sorted(inexact)
