"""Charges calls to their callers' rates. An API key may have two rates (limits for each minute):
one for requests, one for tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from promptq.producer.calls.caller import Caller
from promptq.producer.calls.errors import NOT_AGAIN, ApiError
from promptq.shared.protocol.pictures import Picture
from promptq.shared.protocol.request import TokenAccount
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.queue.scripts import Rate, RateAnswer, take_of_rates

_MINUTE_MS = 60_000
_BYTES_OF_TOKEN = 4096
"""The most bytes of a picture that one token pays for. So a rate of tokens also limits the bytes in
Redis; few pictures need as many bytes."""


async def take_of_queues(
    own: AsyncRequestQueue, serving: AsyncRequestQueue, holder: str, rates: Sequence[Rate]
) -> RateAnswer:
    """Takes a call's costs from the caller's rates: tokens in the queue `serving`, which serves the
    call, and requests in `own`, the gateway's own queue. Takes nothing if a rate does not suffice.

    If the two queues differ and a rate does not suffice, `wait_ms` is the wait for one rate only:
    for tokens if too few are left, otherwise for requests.
    """
    if serving is own:
        return await own.run(take_of_rates(holder, rates))
    tokens = [rate for rate in rates if rate.name == "tokens"]
    requests = [rate for rate in rates if rate.name != "tokens"]
    answer = await serving.run(take_of_rates(holder, tokens))
    if answer.wait_ms != 0:
        requests = [replace(rate, amount=0) for rate in requests]
    requests_answer = await own.run(take_of_rates(holder, requests))
    if answer.wait_ms == 0 and requests_answer.wait_ms != 0:
        returned = [replace(rate, amount=-rate.amount) for rate in tokens]
        answer = await serving.run(take_of_rates(holder, returned))
        answer = replace(answer, wait_ms=requests_answer.wait_ms)
    return RateAnswer(
        answer.wait_ms,
        {**requests_answer.remaining, **answer.remaining},
        {**requests_answer.reset_ms, **answer.reset_ms},
    )


def too_little_left(caller: Caller, rates: Sequence[Rate], answer: RateAnswer) -> str:
    """Returns the message for a call that costs more than a rate has left at the moment."""
    reasons = []
    for rate in rates:
        left, limit = answer.remaining[rate.name], f"{rate.limit} {rate.name} a minute"
        if answer.reset_ms[rate.name] > _MINUTE_MS:
            reasons.append(f"has used more than its {limit}")
        elif left < rate.amount:
            reasons.append(f"has {left} left of its {limit}, and the call needs {rate.amount}")
    seconds = math.ceil((answer.wait_ms or 0) / 1000)
    after = f"{seconds} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"
    return f"the key {caller.name!r} {' and '.join(reasons)}; try again in {after}"


def rates_of(
    caller: Caller, requests: Sequence[Mapping[str, Any]], pictures: Sequence[Picture] = ()
) -> list[Rate]:
    """Returns the costs of `requests` (fields as for `Client.enqueue_many`) in the caller's rates.

    Each request has these `pictures`. The rest of a prompt is estimated as one token for four bytes
    of the payload. Output tokens are charged while they are generated, to `account_of` the caller.
    """
    rates = rate_of_requests(caller, len(requests))
    if caller.tokens_per_minute:
        sizes = [(picture.num_tokens, len(picture.url)) for picture in pictures]
        more = sum(max(num, size // _BYTES_OF_TOKEN) - size // 4 for num, size in sizes)
        tokens = sum(len(json.dumps(request, default=str)) // 4 + more for request in requests)
        rates.append(Rate("tokens", tokens, caller.tokens_per_minute))
    return rates


def account_of(caller: Caller, holder: str) -> TokenAccount | None:
    """Returns the account to which a caller's output is charged; None if the caller has no limit of
    tokens. `holder` is the name under which the server stores the caller's rates."""
    limit = caller.tokens_per_minute
    return TokenAccount(holder, limit) if limit else None


def rate_of_requests(caller: Caller, amount: int) -> list[Rate]:
    """Returns the cost of `amount` requests, as a list; empty without a limit of requests."""
    limit = caller.requests_per_minute
    return [Rate("requests", amount, limit)] if limit else []


def beyond_rates(
    caller: Caller, rates: Sequence[Rate], headers: dict[str, str] | None = None
) -> ApiError:
    """Returns the error for a call that costs more than a minute's limit: no retry can succeed."""
    needed = " and ".join(f"{rate.amount} {rate.name}" for rate in rates)
    limits = " and ".join(f"{rate.limit} {rate.name} a minute" for rate in rates)
    return ApiError(
        429,
        f"the call needs {needed}, and the key {caller.name!r} never has more than {limits}",
        code="rate_limit_exceeded",
        headers={**(headers or {}), **NOT_AGAIN},
    )
