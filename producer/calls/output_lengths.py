"""Predicts the output tokens of a queue's requests, from the outputs of earlier requests.

The gateway predicts, because it enqueues: a worker sees a request after its place is decided. The
state is in memory. Each tenant has its own model, so a guess reveals nothing of other tenants.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import NewRequest, Request
from promptq.shared.queue.call import PAUSE, Call, Operation
from promptq.shared.queue.lookups import state_of

_NUM_FEATURES = 4096
_MOST_WORDS = 24
_MOST_CHARACTERS = 256
_MOST_NAMES = 64
_FIRST_VARIANCE, _LEAST_VARIANCE = 0.05, 0.002
"""Variances of weights, in parts of the variance of an output's logarithm. The least variance lets
a model follow a change."""
_LEAST_OUTPUTS = 16
"""Outputs that a model sees before its first prediction."""
_MEMORY = 128
"""Outputs over which means are taken."""
_MOST_WATCHED = 128
_MOST_TENANTS = 64
_MOST_TOKENS = 2**31
_MOST_LOG = 30.0

Features = Sequence[int]
"""The features of a request: different hashes below `_NUM_FEATURES`."""


def features_of(request: Request) -> Features:
    """Returns the features of a request, from a bounded part of its texts; none if its place in the
    queue does not depend on its output."""
    if request.embed or request.tokenize or request.completion_window:
        return []
    texts = (text.encode("utf-8", "surrogatepass") for text in {*_texts(request)})
    return [*{crc32(text) % _NUM_FEATURES for text in texts}]


def _texts(request: Request) -> Iterator[str]:
    messages = request.messages or []
    start, end, size = _ends(messages[-1].get("content") if messages else request.prompt)
    yield from (f"start {word}" for word in start[:_MOST_WORDS])
    yield from (f"end {word}" for word in end[-_MOST_WORDS:])
    if messages and messages[0].get("role") in ("system", "developer"):
        yield f"system {' '.join(_ends(messages[0].get('content'))[0])}"
    yield from (f"tool {_name(tool)}" for tool in (request.tools or [])[:_MOST_NAMES])
    yield f"choice {_name(request.tool_choice)}"
    yield f"format {_name(request.response_format)}"
    for name, value in [*(request.chat_template_kwargs or {}).items()][:_MOST_NAMES]:
        yield f"option {_name(name)} {_name(value)}"
    numbers = {"most": request.max_tokens or 0, "size": size, "turns": len(messages)}
    yield from (f"{name} {number.bit_length()}" for name, number in numbers.items())


def _ends(content: Any) -> tuple[list[str], list[str], int]:
    """Returns words of the beginning and of the end of a text, of a message's parts or of token
    ids, and its size."""
    if isinstance(content, list) and content and isinstance(content[0], int):
        ids = [str(token_id) for token_id in (*content[:_MOST_WORDS], *content[-_MOST_WORDS:])]
        return ids, ids, len(content)
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [text for part in parts if isinstance(text := part.get("text"), str)] or [""]
    first, last = texts[0][:_MOST_CHARACTERS], texts[-1][-_MOST_CHARACTERS:]
    words = [re.findall(r"\w+|[^\w\s]", text.lower()) for text in (first, last)]
    return words[0], words[1], sum(map(len, texts))


def _name(value: Any) -> str:
    """Returns the name of a tool, choice or format; empty for other values."""
    if isinstance(value, dict):
        inner = value.get("function")
        named = inner if isinstance(inner, dict) else value
        value = named.get("name") or value.get("type")
    return str(value)[:_MOST_CHARACTERS] if isinstance(value, str | bool) else ""


class _Model:
    """Predicts log(1 + output tokens): their mean, and a weight for each feature.

    A Kalman filter with a variance for each weight (https://en.wikipedia.org/wiki/Kalman_filter):
    each output moves the weights whose features were seldom seen the most.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._mean = self._tokens = self._raw = 0.0
        self._weights = array("d", [0.0]) * _NUM_FEATURES
        self._variances = array("d", [_FIRST_VARIANCE]) * _NUM_FEATURES

    def guess(self, features: Features) -> int | None:
        """Returns the expected output tokens; None if too few outputs were seen."""
        if self._num_seen < _LEAST_OUTPUTS:
            return None
        # The exponential of a mean logarithm is less than the mean of the tokens.
        expected = self._raw_guess(features) * self._tokens / self._raw
        return min(_MOST_TOKENS, max(0, round(expected - 1)))

    def learn(self, features: Features, tokens: int) -> None:
        self._num_seen += 1
        part, log = 1 / min(self._num_seen, _MEMORY), math.log1p(tokens)
        self._mean += (log - self._mean) * part
        self._tokens += (1 + tokens - self._tokens) * part
        self._raw += (self._raw_guess(features) - self._raw) * part
        error = log - self._log_guess(features)
        variance = 1 + sum(self._variances[at] for at in features)
        for at in features:
            gain = self._variances[at] / variance
            self._weights[at] += gain * error
            self._variances[at] = max(_LEAST_VARIANCE, self._variances[at] * (1 - gain))

    def _log_guess(self, features: Features) -> float:
        return self._mean + sum(self._weights[at] for at in features)

    def _raw_guess(self, features: Features) -> float:
        return math.exp(max(0.0, min(_MOST_LOG, self._log_guess(features))))


class OutputLengths:
    """Guesses the outputs of one queue's requests, and learns from the requests that it watches."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        """By tenant, the one that enqueued last at the end."""
        self._watched: dict[str, tuple[_Model, Features]] = {}

    def with_guesses(
        self, new: Sequence[NewRequest], features: Sequence[Features], *, watch: bool = True
    ) -> list[NewRequest]:
        """Returns the requests with `expected_tokens`, unless they have them. `features` has the
        features of each request, or is empty if the requests have all fields. With `watch`, the
        requests will be enqueued, and some of them are watched."""
        known = features or [features_of(item.request) for item in new]
        return [self._with_guess(*each, watch) for each in zip(new, known, strict=True)]

    def _with_guess(self, new: NewRequest, features: Features, watch: bool) -> NewRequest:
        if not features:
            return new
        tenant = new.request.tenant or ""
        self._models[tenant] = model = self._models.pop(tenant, None) or _Model()
        if len(self._models) > _MOST_TENANTS:
            del self._models[next(iter(self._models))]
        if watch and not new.delay_ms and self._may_watch(model):
            self._watched[new.request_id] = model, features
        guess = model.guess(features)
        if guess is None or new.request.expected_tokens is not None:
            return new
        return replace(new, request=new.request.model_copy(update={"expected_tokens": guess}))

    def _may_watch(self, model: _Model) -> bool:
        """A tenant takes at most half of the places that other tenants leave. No request loses its
        place to a later one: the long requests would, and guesses would become too short."""
        num_own = sum(each is model for each, _ in self._watched.values())
        return num_own < _MOST_WATCHED - len(self._watched)

    def learn(self, keys: Keys) -> Operation[None]:
        """Reads the watched requests, and learns from those that have ended."""
        watched = [*self._watched.items()]
        if not watched:
            return
        outputs = yield [_read_output(keys, request_id) for request_id, _ in watched]
        for (request_id, (model, features)), tokens in zip(watched, outputs, strict=True):
            if tokens is None:
                continue
            del self._watched[request_id]
            if tokens > 0:
                model.learn(features, tokens)
                yield PAUSE


def _read_output(keys: Keys, request_id: str) -> Call[int | None]:
    """Reads the output tokens of a request; 0 if the request has ended without an answer or is
    unknown, None if it has not ended."""

    def parse(reply: list[bytes | None]) -> int | None:
        state, reason, last_event = reply
        if state is not None and not state_of(state).is_final:
            return None
        if reason not in (b"stop", b"length") or last_event is None:
            return 0
        return min(_MOST_TOKENS, int(json.loads(last_event)["usage"]["completion_tokens"]))

    names = "state", "finish_reason", "last_event"
    return Call("", ["HMGET", keys.request(request_id), *names], parse, lambda: 0)
