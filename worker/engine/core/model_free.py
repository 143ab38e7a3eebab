"""An engine without a model: the next token is a known function of seed and position.

It starts at once and without torch, and every reader of its streams can say which token must come
next. In place of K and V it keeps, for each position, a fingerprint of all tokens up to it: what
attention would need to be right. So a wrong block table, a block shared too early or freed twice
shows up as an error, not as a subtly different text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from promptq.shared.protocol.events import TokenLogprob, TopLogprob
from promptq.worker.engine.api.messages import EngineAbilities, EngineRequest
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.runner import KVLayout, SampledToken
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence

END_TOKEN_ID = 256
"""The vocabulary is the 256 bytes and this; it is never sampled, so that length decides."""

_LETTERS = b"abcdefghijklmnopqrstuvwxyz "
_MASK = 2**64 - 1


def token_at(seed: int, position: int) -> int:
    """The token at output index `position` (0 is the first after the prompt): a letter or a space.

    Nothing else goes in, neither prompt nor attempt, so a resumed request continues the very same
    stream. The mixing is that of SplitMix64.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0x94D049BB133111EB) & _MASK
    return _LETTERS[(mixed ^ (mixed >> 31)) % len(_LETTERS)]


def tokens_of(seed: int, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens that a request with this seed gets."""
    return [token_at(seed, position) for position in range(num_tokens)]


_Pending = dict[int, int]
"""The token of each sequence id in the step before, if that is not collected yet."""


@dataclass(frozen=True, slots=True)
class ModelFreeStep:
    """A step and what it samples."""

    batch: Batch
    sampled: list[list[SampledToken]]

    def tokens_of(self) -> _Pending:
        """What it gave each sequence; for a step without drafts."""
        shares = zip(self.batch.sampling, self.sampled, strict=True)
        return {share.sequence.sequence_id: tokens[0].token_id for share, tokens in shares}


class ModelFreeRunner:
    """A runner that computes nothing, and checks that it could have.

    `step_seconds` is how long a step takes. `verify` reads the whole cache of each sampling
    sequence back and raises RuntimeError at the first position that is not what its block table
    promises; that costs time in proportion to all tokens held, so switch it off to measure.
    Sampling parameters other than `logprobs` and the seed are ignored.
    """

    abilities = EngineAbilities(grammars=False)

    def __init__(
        self,
        num_blocks: int = 256,
        block_size: int = 16,
        *,
        vocab_size: int = END_TOKEN_ID + 1,
        max_model_len: int | None = None,
        step_seconds: float = 0.0,
        verify: bool = True,
    ) -> None:
        self.kv_layout = KVLayout(num_blocks, block_size, bytes_per_token=8)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len or num_blocks * block_size
        self.step_seconds = step_seconds
        self._cache: list[int | None] | None = (
            [None] * (num_blocks * block_size) if verify else None
        )

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        if self._cache is not None:
            pending = after.tokens_of() if after is not None else {}
            _check_batch(batch, pending)
            self._write(batch, pending, self._cache)
            for share in batch.sampling:
                self._read_back(share, pending, self._cache)
        sampled = [
            [_sample(share.sequence, share.num_ahead + row) for row in range(share.num_samples)]
            for share in batch.sampling
        ]
        return ModelFreeStep(batch, sampled)

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        return launched.sampled

    def peak_memory_bytes(self) -> int:
        return 0

    def _write(self, batch: Batch, pending: _Pending, cache: list[int | None]) -> None:
        # All reads come before all writes: what another sequence computes in the same step is not
        # there yet.
        before = [self._fingerprint_before(share, cache) for share in batch.scheduled]
        written: set[int] = set()
        for share, fingerprint in zip(batch.scheduled, before, strict=True):
            for position, token_id in enumerate(_token_ids(share, pending), start=share.start):
                fingerprint = hash((fingerprint, token_id))
                cell = self._cell(share.sequence, position)
                if cell in written:
                    raise RuntimeError(f"two sequences write cell {cell} in one step")
                written.add(cell)
                cache[cell] = fingerprint

    def _fingerprint_before(self, share: ScheduledSequence, cache: list[int | None]) -> int:
        if share.start == 0:
            return hash(share.sequence.request.cache_salt)
        fingerprint = cache[self._cell(share.sequence, share.start - 1)]
        if fingerprint is None:
            raise RuntimeError(
                f"sequence {share.sequence.sequence_id} goes on at position {share.start}, "
                "and nothing is cached before it"
            )
        return fingerprint

    def _read_back(
        self, share: ScheduledSequence, pending: _Pending, cache: list[int | None]
    ) -> None:
        sequence = share.sequence
        fingerprint = hash(sequence.request.cache_salt)
        before = sequence.token_ids[: share.start]
        for position, token_id in enumerate([*before, *_token_ids(share, pending)]):
            fingerprint = hash((fingerprint, token_id))
            if cache[self._cell(sequence, position)] != fingerprint:
                raise RuntimeError(
                    f"sequence {sequence.sequence_id} reads something else than its own "
                    f"position {position} through its block table"
                )

    def _cell(self, sequence: Sequence, position: int) -> int:
        size = self.kv_layout.block_size
        return sequence.block_table[position // size] * size + position % size


def _token_ids(share: ScheduledSequence, pending: _Pending) -> list[int]:
    """Of its rows; of one planned ahead, the token that the step before gives it."""
    return share.token_ids or [pending[share.sequence.sequence_id]]


def _check_batch(batch: Batch, pending: _Pending) -> None:
    slots = [share.sequence.slot for share in batch.scheduled]
    if None in slots or len(set(slots)) != len(slots):
        raise RuntimeError(f"slots {slots} are not one for each sequence")
    for share in batch.scheduled:
        sequence, end = share.sequence, share.start + share.num_tokens
        num_pending = sequence.sequence_id in pending
        if share.start != sequence.num_computed_tokens + num_pending or share.num_tokens < 1:
            raise RuntimeError(f"sequence {sequence.sequence_id} has a share that does not follow")
        num_tokens = sequence.num_tokens + num_pending
        if end > num_tokens or share.samples != (end == num_tokens):
            raise RuntimeError(f"sequence {sequence.sequence_id} samples at {end} tokens")
        if share.draft and not share.samples:
            raise RuntimeError(f"sequence {sequence.sequence_id} drafts before its last token")


def _sample(sequence: Sequence, num_ahead: int) -> SampledToken:
    request: EngineRequest = sequence.request
    token_id = token_at(request.seed, sequence.num_output_tokens + num_ahead)
    num_top = request.params.logprobs
    if num_top is None:
        return SampledToken(token_id)
    top = [TopLogprob(token_id=token_id, logprob=0.0)] if num_top else None
    return SampledToken(token_id, TokenLogprob(token_id=token_id, logprob=0.0, rank=1, top=top))


def build_model_free_engine(
    *,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 512,
    prefill_chunk: int | None = None,
    max_model_len: int | None = None,
    speculative_tokens: int = 0,
    async_scheduling: bool = False,
    share_prefix_cache: bool = False,
    num_blocks: int = 256,
    block_size: int = 16,
    step_seconds: float = 0.0,
    verify: bool = True,
) -> LLMEngine:
    """An engine around a `ModelFreeRunner`, ready to use."""
    runner = ModelFreeRunner(num_blocks, block_size, step_seconds=step_seconds, verify=verify)
    return LLMEngine(
        runner,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk=prefill_chunk,
        max_model_len=max_model_len,
        speculative_tokens=speculative_tokens,
        async_scheduling=async_scheduling,
        share_prefix_cache=share_prefix_cache,
    )
