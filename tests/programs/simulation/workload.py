"""Makes the requests of a world: short ones, and some that run while much else happens."""

from __future__ import annotations

import random

from tests.programs.chaos.audit.records import Kind, Sent
from tests.programs.chaos.requests import make_request
from tests.programs.simulation import clock
from tests.programs.simulation.loop import Process
from tests.programs.simulation.processes import QUEUE
from tests.support.model_free import tokens_of

_MOST_TOKENS = 20
_MOST_TOKENS_OF_LONG = 120
_SHARE_OF_LONG = 0.1
_SHARE_OF_TRUE_GUESSES = 0.5
_AGAIN_KINDS = (Kind.PLAIN, Kind.PLAIN, Kind.CANCEL)


def make_requests(process: Process, rng: random.Random, count: int) -> list[Sent]:
    """Returns `count` requests. Their ids come from the clock and the entropy of `process`."""
    before, clock.running = clock.running, process
    requests = [make_request(QUEUE, rng) for _ in range(count)]
    clock.running = before
    for request in requests:
        may_end_early = request.kind is Kind.CANCEL or "stop" in request.fields
        is_long = may_end_early or rng.random() < _SHARE_OF_LONG
        most = _MOST_TOKENS_OF_LONG if is_long else _MOST_TOKENS
        request.fields["max_tokens"] = rng.randint(1, most)
        if "expected_tokens" in request.fields and rng.random() < _SHARE_OF_TRUE_GUESSES:
            request.fields["expected_tokens"] = request.fields["max_tokens"]
        if "stop" in request.fields:
            request.fields["stop"] = _part_of_answer(request, rng)
    return requests


def _part_of_answer(request: Sent, rng: random.Random) -> str:
    """Returns two letters of the answer, or one if it is short."""
    text = bytes(tokens_of(request.fields["seed"], request.fields["max_tokens"])).decode()
    start = rng.randrange(len(text))
    return text[start : start + 2]


def make_again(process: Process, rng: random.Random) -> list[Sent]:
    """Returns the last requests of a client. No fault delays these requests."""
    requests = make_requests(process, rng, len(_AGAIN_KINDS))
    for request, kind in zip(requests, _AGAIN_KINDS, strict=True):
        request.kind, request.delay_ms = kind, 0
        request.fields.pop("deadline_ms", None)
        request.fields.pop("idempotency_key", None)
        is_long = kind is Kind.CANCEL or request is requests[0]
        request.fields["max_tokens"] = _MOST_TOKENS_OF_LONG if is_long else _MOST_TOKENS
    return requests
