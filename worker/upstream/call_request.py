"""Splits a request into several calls, for a server that cannot serve the request in one call.

Each call continues the output: the call's prompt ends with the output so far. Together, the calls
return the output that one call of a server without limits would return.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from promptq.worker.engine.api.messages import EngineAbilities, EngineRequest
from promptq.worker.upstream.dialects.dialect import Chunk, Mask
from promptq.worker.upstream.dialects.transport import UnusableAnswerError

_MOST_REDRAWN = 1000
"""The most redraws of one token. Near temperature 0, the odds of a redraw are below 1/2, unless two
tokens tie."""
_SEED_STEPS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0xD1342543DE82EF95)


class CallRequest:
    """Turns a request into one request for each call of the server.

    Penalties: a server counts only the tokens of one call. So in later calls, biases contain the
    penalties of earlier tokens, and `presence_penalty` is 0. If the request has a presence penalty,
    a later call ends after the first token that is new in the output. The biases of the next call
    then contain the penalty of this token.

    Low temperatures: the server draws at its lowest temperature. Each drawn token is kept with the
    odds that give the right distribution (rejection sampling). A token that is not kept is drawn
    again in another call.
    """

    def __init__(
        self, abilities: EngineAbilities, request: EngineRequest, keeps_seeds: bool
    ) -> None:
        self._request, params = request, request.params
        self._has_penalties = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._most_biases = abilities.most_biases
        self._counted: Collection[int] | None = None
        """Tokens whose presence penalty is in the call's biases; None if no bias has one."""
        lowest = abilities.lowest_temperature
        self._sharpness = 0.0
        if 0.0 < params.temperature < lowest:
            self._sharpness = 1.0 / params.temperature - 1.0 / lowest
        self._random = Random(request.seed)  # noqa: S311 # samples tokens
        self._num_redraws = self._num_here = 0
        self._keeps_seeds = keeps_seeds

    def after(self, output: Sequence[int], mask: Mask | None = None) -> EngineRequest:
        """Returns the request for a call that continues `output`, or that chooses a token under a
        mask."""
        params = self._request.params
        update: dict[str, Any] = {}
        if self._sharpness:
            update["logprobs"] = max(1, params.logprobs or 0)
        if self._has_penalties and output:
            biases = dict(params.logit_bias or {})
            for token_id, times in Counter(output).items():
                by = params.presence_penalty + params.frequency_penalty * times
                biases[str(token_id)] = biases.get(str(token_id), 0.0) - by
            largest = sorted(biases.items(), key=lambda item: -abs(item[1]))[: self._most_biases]
            update |= {"logit_bias": dict(largest), "presence_penalty": 0.0}
            self._counted = frozenset(output) if params.presence_penalty else None
        params = params.model_copy(update=update) if update else params
        return replace(self._request, params=params, seed=self._seed(len(output), mask))

    def _seed(self, num_emitted: int, mask: Mask | None) -> int:
        """Returns the seed of a call. On most servers, random numbers begin anew with each call. So
        each call has another seed. A choice under a mask needs a new seed too: the random numbers
        of the previous call have chosen a token outside of the mask."""
        num_choices = 0 if mask is None else 1 + len(mask.rejected)
        counts = (0, 0) if self._keeps_seeds else (num_emitted, num_choices)
        steps = zip((*counts, self._num_redraws), _SEED_STEPS, strict=True)
        return (self._request.seed + sum(count * step for count, step in steps)) % 2**63

    def is_miscounted_after(self, token_id: int) -> bool:
        """Whether the current call would not apply the presence penalty of this token."""
        return self._counted is not None and token_id not in self._counted

    def cut_rejected(self, chunk: Chunk) -> bool:
        """Drop the first token that another call must draw again, and all later tokens. Returns
        whether a token was dropped. Removes log-probabilities that were not requested.

        Raises UnusableAnswerError for missing or impossible log-probabilities.
        """
        if not self._sharpness:
            return False
        entries, num_top = chunk.logprobs or [], self._request.params.logprobs
        if len(entries) < len(chunk.token_ids):
            raise UnusableAnswerError("a log-probability is missing")
        for number, entry in enumerate(entries):
            if not entry.top or self._num_here > _MOST_REDRAWN:
                raise UnusableAnswerError("log-probabilities that its own tokens contradict")
            odds = math.exp(min(0.0, (entry.logprob - entry.top[0].logprob) * self._sharpness))
            if self._random.random() >= odds:
                self._num_here += 1
                chunk.cut(number)
                chunk.finish_reason = None
                break
            self._num_here = 0
            entry.top = entry.top[:num_top] or None
        self._num_redraws += (is_cut := self._num_here > 0)
        if num_top is None:
            chunk.logprobs = None
        return is_cut
