"""The place of a request in its queue: how many requests wait in front, and when it will start."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.protocol.request import RequestState
from promptq.shared.queue.call import Call, Operation, text_of, texts_of
from promptq.shared.queue.lookups import state_of

_NORMAL_P95 = 1.645
"""The 95th percentile of the standard normal distribution."""
_MOST_VARIANCE = 4.0
"""Limit of the relative variance of a start, beyond which the approximation does not hold."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request waits. All numbers are None if the request does not wait or if they are
    unknown; `because` then says why."""

    state: RequestState
    because: str = ""
    in_front: int | None = None
    """Number of waiting requests that run first; see `at_most`."""
    at_most: bool = False
    """Whether fewer than `in_front` may run first. Among several tenants, `in_front` counts all
    requests of the others."""
    tokens_in_front: int | None = None
    """Estimate of the tokens of these requests, from the tenant's mean request."""
    delayed_ms: int | None = None
    """Milliseconds until a delayed request may run."""
    requests_per_second: float | None = None
    """Requests that the workers ended per second in the last minute, like `tokens_per_second`."""
    tokens_per_second: float | None = None
    start_p50_ms: int | None = None
    """Milliseconds until the start, with a probability of one half."""
    start_p95_ms: int | None = None

    def __str__(self) -> str:
        if self.in_front is None:
            return f"{self.state}: {self.because}"
        most, num = "at most " if self.at_most else "", self.in_front
        waits = "request waits" if num == 1 else "requests wait"
        text = f"{self.state}: {most}{num:,} {waits} in front" if num else f"{self.state}: next"
        if self.tokens_in_front:
            text += f", with about {self.tokens_in_front:,} tokens"
        if self.delayed_ms:
            text += f"; delayed for {_duration(self.delayed_ms)}"
        if self.start_p50_ms is None or self.start_p95_ms is None:
            return f"{text}; the start is unknown: {self.because}"
        p50, p95 = _duration(self.start_p50_ms), _duration(self.start_p95_ms)
        return f"{text}; starts in about {p50}, at 95% within {p95}"


def place(keys: Keys, /, request_id: str) -> Operation[Place]:
    """Reads the place of a request. Raises RequestNotFoundError."""
    found: Place | None = yield _place(check_request_id(request_id))
    if found is None:
        raise RequestNotFoundError.of(request_id, keys.queue)
    return found


def _place(request_id: str) -> Call[Place | None]:
    def parse(reply: list[Any]) -> Place | None:
        if not (state := text_of(reply[0])):
            return None
        if state != RequestState.WAITING:
            is_active = state == RequestState.ACTIVE
            because = "a worker holds the request" if is_active else "the request has ended"
            return Place(state_of(state), because)
        if reply[1] == b"":
            return Place(RequestState.WAITING, "the request is in no queue")
        return _waiting(*texts_of(reply[1:]))

    return Call("place", [request_id], parse)


def _waiting(
    in_front: str, at_most: str, expected: str, tokens_of_each: str, delayed_ms: str, workers: str,
    paused: str, num_ended: str, dispersion: str, tokens: str, window_ms: str,
) -> Place:  # fmt: skip
    """Returns the place for the values in the script's reply, in their order."""
    num, delay = int(in_front), int(delayed_ms)
    ended, seconds, because = float(num_ended), int(window_ms) / 1000, ""
    found = Place(
        RequestState.WAITING,
        in_front=num,
        at_most=at_most == "1",
        tokens_in_front=round(num * float(tokens_of_each or 0))
        if tokens_of_each or not num
        else None,
        delayed_ms=delay or None,
    )
    if paused == "1":
        because = "the queue is paused"
    elif workers == "0":
        because = "no worker is alive"
    elif not ended:
        because = "no output was measured in the last minute"
    if because:
        return replace(found, because=because)
    # The request starts when those in front have started and one more request has ended.
    measured = ended, seconds, float(dispersion)
    return replace(
        found,
        requests_per_second=round(ended / seconds, 3),
        tokens_per_second=round(float(tokens) / seconds, 1),
        start_p50_ms=delay + _quantile(float(expected) + 1, *measured, 0.0),
        start_p95_ms=delay + _quantile(num + 1, *measured, _NORMAL_P95),
    )


def _quantile(num: float, ended: float, seconds: float, dispersion: float, normal: float) -> int:
    """Returns the milliseconds until `num` requests have ended, if `ended` of them did in the last
    `seconds`. `normal` is the quantile of the standard normal distribution.

    The time has about a gamma distribution. Its relative variance has two parts: of the requests
    to come, and of the rate that was measured (Wilson and Hilferty, 1931).
    """
    variance = min(_MOST_VARIANCE, dispersion * (1 / num + 1 / ended))
    factor = 1 - variance / 9 + normal * math.sqrt(variance / 9)
    return math.ceil(1000 * num * seconds / ended * factor**3)


def _duration(milliseconds: int) -> str:
    seconds = math.ceil(milliseconds / 1000)
    if seconds < 120:
        return f"{seconds} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{math.ceil(minutes / 60):,} h"
