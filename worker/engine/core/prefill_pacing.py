"""Limits the prompt tokens of a step, so that the decodes in the same step keep their pace."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from promptq.worker.engine.core.sequence import Batch

LONG_PROMPT = 512
"""Prompts with more tokens than this are computed in paced chunks while other sequences decode."""
STRETCH = 1.6
"""Time limit of a step with a long prompt's chunk, as a multiple of a step of decodes only."""
MIN_CHUNK = 4
"""The least tokens of a chunk. Fewer would not be worth the fixed cost of a step."""
PROMPTS_STRETCH = 5.0
"""The time limit of a step with any prompts, as a multiple of the time of a step with decodes only.
So if several prompts arrive at once, the first need not wait for the last."""
MIN_PROMPT_TOKENS = 256
"""A step may have this many prompt tokens in all, except while `Pacing.prompt_tokens` is 0."""
_RECENT, _RECENT_PROMPTS = 5, 9
"""Numbers of recent steps whose times are kept: steps with decodes only, and steps with prompts.
Medians of these times are used, because a single delayed step says little."""
_GROWTH = 4
"""A chunk has at most this many times the tokens of the largest recent chunk."""
_CAUTION, _BOLDNESS = 4, 16
"""Pacing assumes that a prompt token takes at least 1 / n of the time that each prompt token took
in the largest recent step. n is _CAUTION if recent steps had about equal numbers of prompt tokens,
otherwise _BOLDNESS."""


@dataclass(frozen=True, slots=True)
class _PromptStep:
    """A step with prompt tokens. `beyond` is `seconds` minus the time of the step's decodes."""

    num_tokens: int
    seconds: float
    beyond: float


class Pacing:
    """Measures the cost of decodes and prompts, and derives the sizes of chunks from the cost.

    A step with prompt tokens takes the time of its decodes, a fixed time, and a time for each
    prompt token. The fixed time is long if steps with decodes only are replayed as a CUDA graph and
    other steps are not. Then small chunks save nothing: a prompt would pay the fixed time again and
    again. So the tokens of a chunk may always take as long as the fixed time.
    """

    def __init__(self) -> None:
        self._decode_seconds = deque[float](maxlen=_RECENT)  # of a step of decodes alone
        self._prompts = deque[_PromptStep](maxlen=_RECENT_PROMPTS)
        self._fixed_seconds = 0.0  # of a step with prompt tokens, beyond its decodes
        self._token_seconds = 0.0  # of one token of a prompt; 0 if it is not known

    @property
    def chunk(self) -> int:
        """Maximum number of tokens of one long prompt in a step with decodes."""
        sizes = {step.num_tokens for step in self._prompts}
        if not sizes:
            return MIN_CHUNK
        chunk = max(MIN_CHUNK, self._tokens_within(STRETCH))
        if chunk == MIN_CHUNK and len(sizes) == 1:
            return 2 * sizes.pop()  # another size separates the fixed time from the time of tokens
        return min(chunk, _GROWTH * max(sizes))

    @property
    def prompt_tokens(self) -> int:
        """Maximum number of prompt tokens in a step with decodes. If only steps with prompts were
        measured, this is 0, so that the next step measures decodes alone."""
        if self._prompts and not self._decode_seconds:
            return 0
        return max(MIN_PROMPT_TOKENS, self._tokens_within(PROMPTS_STRETCH))

    def _tokens_within(self, stretch: float) -> int:
        if self._token_seconds == 0.0:
            return 0
        allowed = (stretch - 1.0) * self._decodes_alone - self._fixed_seconds
        return int(max(allowed, self._fixed_seconds) / self._token_seconds)

    @property
    def _decodes_alone(self) -> float:
        return median(self._decode_seconds) if self._decode_seconds else 0.0

    def note(self, batch: Batch, seconds: float) -> None:
        """Update the measured times with a step that took `seconds`."""
        prompts = [
            share.num_tokens
            for share in batch.scheduled
            if not share.sequence.is_decode(share.start, share.num_tokens)
        ]
        num_decodes, num_prompt_tokens = len(batch.scheduled) - len(prompts), sum(prompts)
        if num_prompt_tokens == 0:
            self._decode_seconds.append(seconds)
        elif num_prompt_tokens >= MIN_CHUNK:
            beyond = max(0.0, seconds - self._decodes_alone) if num_decodes else seconds
            self._prompts.append(_PromptStep(num_prompt_tokens, seconds, beyond))
            self._fit()

    def _fit(self) -> None:
        """Fit a fixed time and a time per token to recent steps, by the median slope of pairs
        (Theil-Sen). If all steps have about the same size, the fixed time keeps its value."""
        largest = max(self._prompts, key=lambda step: step.num_tokens)
        slopes = [
            (one.beyond - other.beyond) / (one.num_tokens - other.num_tokens)
            for one, other in combinations(self._prompts, 2)
            if abs(one.num_tokens - other.num_tokens) >= largest.num_tokens / 4
        ]
        if slopes:
            slope = max(0.0, median(slopes))
            fixed = median(step.beyond - slope * step.num_tokens for step in self._prompts)
            self._fixed_seconds = max(0.0, fixed)
        else:
            slope = median(
                (step.beyond - self._fixed_seconds) / step.num_tokens for step in self._prompts
            )
        # Never 0: a lucky measurement must not allow chunks of any size.
        least = largest.seconds / largest.num_tokens / (_BOLDNESS if slopes else _CAUTION)
        self._token_seconds = max(slope, least)
