"""A runner without a model: the next token is a known function of seed and position.

An engine with this runner starts immediately, without torch, and a reader can check every token.
"""

from __future__ import annotations

from dataclasses import dataclass

from promptq.shared.protocol.events import TokenLogprob, TopLogprob
from promptq.worker.engine.api.messages import EngineAbilities, PromptLogprobs
from promptq.worker.engine.core.runner import KVLayout, SampledToken
from promptq.worker.engine.core.sequence import Batch, Sequence

END_TOKEN_ID = 256
"""The token after the 256 bytes in the vocabulary. It is never sampled: requests end by length."""

_LETTERS = b"abcdefghijklmnopqrstuvwxyz "
_MASK = 2**64 - 1


def token_at(seed: int, position: int) -> int:
    """Returns the token at output index `position`, from 0: a letter or a space.

    The token depends neither on the prompt nor on the attempt, so a resumed request continues the
    same stream. The bits are mixed as in SplitMix64.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0x94D049BB133111EB) & _MASK
    return _LETTERS[(mixed ^ (mixed >> 31)) % len(_LETTERS)]


@dataclass(frozen=True, slots=True)
class ModelFreeStep:
    """A launched step: its batch and the tokens that it samples."""

    batch: Batch
    sampled: list[list[SampledToken]]


class ModelFreeRunner:
    """A runner that computes nothing. Uses only the seed and `logprobs` of a request's
    parameters."""

    abilities = EngineAbilities(grammars=False, unheeded=frozenset({"embed", "prompt_logprobs"}))
    vocab_size = END_TOKEN_ID + 1
    embedding_size = 0

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.kv_layout = KVLayout(num_blocks, block_size, bytes_per_token=8)
        self.max_model_len = max_model_len

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        sampled = [
            [_sample(share.sequence, share.num_ahead + row) for row in range(share.num_samples)]
            for share in batch.sampling
        ]
        return ModelFreeStep(batch, sampled)

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        return launched.sampled

    def prompt_logprobs(self, launched: ModelFreeStep) -> list[PromptLogprobs]:
        return []  # `abilities` excludes them

    def peak_memory_bytes(self) -> int:
        return 0


def _sample(sequence: Sequence, num_ahead: int) -> SampledToken:
    request = sequence.request
    token_id = token_at(request.seed, sequence.num_output_tokens + num_ahead)
    num_top = request.params.logprobs
    if num_top is None:
        return SampledToken(token_id)
    top = [TopLogprob(token_id=token_id, logprob=0.0)] if num_top else None
    return SampledToken(token_id, TokenLogprob(token_id=token_id, logprob=0.0, rank=1, top=top))
