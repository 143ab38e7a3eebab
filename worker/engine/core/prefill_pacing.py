"""How much of the prompts goes into a step, so that those who decode beside them go on."""

from __future__ import annotations

from collections import deque
from statistics import median

from promptq.worker.engine.core.sequence import Batch

LONG_PROMPT = 512
"""Tokens beyond which a prompt is computed in paced chunks while others decode."""
STRETCH = 1.6
"""What a step with a chunk of a long prompt may take, in steps that only decode."""
MIN_CHUNK = 4
"""Tokens of a chunk at least: less would not be worth a step's fixed cost."""
PROMPTS_STRETCH = 5.0
"""What a step with prompts of any length may take, likewise: of several that come at once, the
first need not wait for the last."""
MIN_PROMPT_TOKENS = 256
"""Of all prompts in a step at least."""
_RECENT = 5
"""Steps of each kind; their median is what one costs, as one that was delayed says nothing."""


class Pacing:
    """Learns what decodes and prompt tokens cost here, and gives the chunk that keeps STRETCH."""

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
            # Never nothing: a lucky measurement must not allow chunks without bound.
            self._token_seconds.append(max(token_seconds, seconds / num_prompt_tokens / 4))
