"""The place of a request in its queue: how many requests wait in front, and when it will start.

A quote is the place of a request that would be enqueued now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.protocol.request import NewRequest, RequestState
from promptq.shared.queue.call import Call, Operation, named, text_of, texts_of
from promptq.shared.queue.lookups import state_of


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
    requests of the others. With `affinity_ms`, it counts all requests that may overtake."""
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


@dataclass(frozen=True, slots=True)
class Quote(Place):
    """Where a request would wait, and when it would start and end, if it were enqueued now. A time
    is None if it is unknown; `because` then says why."""

    end_p50_ms: int | None = None
    """Milliseconds until the end, with a probability of one half."""
    end_p95_ms: int | None = None

    def __str__(self) -> str:
        text = Place.__str__(self)
        if self.end_p50_ms is None or self.end_p95_ms is None:
            return text
        p50, p95 = _duration(self.end_p50_ms), _duration(self.end_p95_ms)
        return f"{text}; ends in about {p50}, at 95% within {p95}"


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
        return Place(RequestState.WAITING, **_times_of(reply))

    return Call("place", [request_id], parse)


def quote(new: Sequence[NewRequest]) -> Call[Quote]:
    """Returns the call that quotes the last of these requests, as if all were enqueued now."""
    item, request = new[-1], new[-1].request
    is_generating = request.embed is None and not request.tokenize
    args = named(
        tenant=request.tenant or "",
        priority=request.priority,
        deadline_ms=request.deadline_ms or "",
        by_deadline="1" if request.completion_window else "",
        delay_ms=item.delay_ms,
        max_output=(request.max_tokens or "") if is_generating else 0,
        expected_tokens="" if request.expected_tokens is None else request.expected_tokens,
        num_before=len(new) - 1,
    )
    return Call("place", args, quote_of)


def quote_of(reply: Sequence[Any]) -> Quote:
    """Returns the quote for the values in a script's reply."""
    found = _times_of(reply)
    p50, p95 = (int(ms) if ms else None for ms in texts_of(reply[14:16]))
    if p50 is None and not found["because"]:
        found["because"] = "no speed of running requests was measured in the last minute"
    return Quote(RequestState.WAITING, **found, end_p50_ms=p50, end_p95_ms=p95)


def _times_of(reply: Sequence[Any]) -> dict[str, Any]:
    """Returns the fields of a place for the values in the reply of the script `place`."""
    num, delay, workers, paused = (int(reply[nth]) for nth in (1, 5, 6, 7))
    tokens_of_each, ended, tokens = (float(reply[nth] or 0) for nth in (4, 8, 10))
    seconds, (p50, p95) = int(reply[11]) / 1000, texts_of(reply[12:14])
    because = ""
    if paused:
        because = "the queue is paused"
    elif not workers:
        because = "no worker is alive"
    elif not ended:
        because = "no output was measured in the last minute"
    elif not p50:
        because = "no worker has reported its speed yet"
    found = {
        "because": because,
        "in_front": num,
        "at_most": int(reply[2]) == 1,
        "tokens_in_front": round(num * tokens_of_each) if tokens_of_each or not num else None,
        "delayed_ms": delay or None,
    }
    if because:
        return found
    return found | {
        "requests_per_second": round(ended / seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "start_p50_ms": int(p50),
        "start_p95_ms": int(p95),
    }


def _duration(milliseconds: int) -> str:
    seconds = math.ceil(milliseconds / 1000)
    if seconds < 120:
        return f"{seconds} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{math.ceil(minutes / 60):,} h"
