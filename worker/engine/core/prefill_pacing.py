"""Decides how many prompt tokens go into a step, so that the decodes beside them keep their
pace."""

from __future__ import annotations

from collections import deque
from statistics import median

from promptq.worker.engine.core.sequence import Batch

LONG_PROMPT = 512
"""A prompt of more tokens is computed in paced chunks while other sequences decode."""
STRETCH = 1.6
"""How long a step with a chunk of a long prompt may take, relative to a step of decodes alone."""
MIN_CHUNK = 4
"""The least tokens of a chunk. Fewer would not be worth the fixed cost of a step."""
PROMPTS_STRETCH = 5.0
"""The same for a step with prompts of any length. The first of several prompts that come together
need not wait for the last."""
MIN_PROMPT_TOKENS = 256
"""The least tokens of all prompts in a step."""
_RECENT = 5
"""How many steps of each kind are remembered. Their median counts, as one delayed step says
little."""


class Pacing:
    """Learns what decodes and prompt tokens cost here, and derives the sizes of chunks."""

    def __init__(self) -> None:
        self._decode_seconds = deque[float](maxlen=_RECENT)  # of a step of decodes alone
        self._token_seconds = deque[float](maxlen=_RECENT)  # of one token of a prompt

    @property
    def chunk(self) -> int:
        """Tokens of a long prompt in a step beside decodes."""
        return max(MIN_CHUNK, self._tokens_within(STRETCH))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts in a step beside decodes."""
        return max(MIN_PROMPT_TOKENS, self._tokens_within(PROMPTS_STRETCH))

    def _tokens_within(self, stretch: float) -> int:
        if not self._decode_seconds or not self._token_seconds:
            return 0
        return int((stretch - 1.0) * median(self._decode_seconds) / median(self._token_seconds))

    def note(self, batch: Batch, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        num_decodes = sum(share.num_tokens == 1 for share in batch.scheduled)
        num_prompt_tokens = batch.num_tokens - num_decodes
        if num_prompt_tokens == 0:
            self._decode_seconds.append(seconds)
        elif num_prompt_tokens >= MIN_CHUNK:
            beside = median(self._decode_seconds) if num_decodes and self._decode_seconds else 0.0
            token_seconds = max(0.0, seconds - beside) / num_prompt_tokens
            # Never zero, because one lucky measurement must not allow unlimited chunks.
            self._token_seconds.append(max(token_seconds, seconds / num_prompt_tokens / 4))
