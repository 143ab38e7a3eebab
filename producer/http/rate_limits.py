"""Charges calls to their callers' rates over HTTP, and reports the rates in headers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import Depends

from promptq.producer.calls.caller import Caller
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.calls.rate_costs import (
    beyond_rates,
    rate_of_requests,
    take_of_queues,
    too_little_left,
)
from promptq.producer.http.auth import ThisCaller
from promptq.producer.http.errors import described
from promptq.producer.http.state import Gateway, ThisGateway
from promptq.shared.queue.scripts import Rate


async def admit_call(gateway: Gateway, caller: Caller) -> dict[str, str]:
    """Takes one request from the caller's rate, before the call's body is read. Returns headers
    that report the rate. Raises ApiError 429."""
    return await take(gateway, gateway.queues.own, caller, rate_of_requests(caller, 1))


async def count_read(gateway: ThisGateway, caller: ThisCaller) -> None:
    """Dependency that takes one request from the caller's rate. Raises ApiError 429."""
    await admit_call(gateway, caller)


COUNTED_READ: dict[str, Any] = {"dependencies": [Depends(count_read)], "responses": described(429)}
"""Options of a route with large answers: each call takes one request from the caller's rate."""


async def take(
    gateway: Gateway,
    served: ServedQueue,
    caller: Caller,
    rates: Sequence[Rate],
    *,
    is_last_try: bool = True,
) -> dict[str, str]:
    """Takes the amounts in `rates` from the caller's rates. Returns headers that report the rates.

    Requests are counted in the gateway's own queue, because a call is counted before its body names
    a model. Tokens are counted in the queue that serves the call, where workers charge the output.

    Raises ApiError 429. With `is_last_try`, the error is delayed by at most a second for a caller
    that calls again too early.
    """
    if not rates:
        return {}
    answer = await take_of_queues(gateway.queue, served.queue, caller.name, rates)
    headers = {}
    for rate in rates:
        headers[f"x-ratelimit-limit-{rate.name}"] = str(rate.limit)
        headers[f"x-ratelimit-remaining-{rate.name}"] = str(answer.remaining[rate.name])
        headers[f"x-ratelimit-reset-{rate.name}"] = f"{answer.reset_ms[rate.name]}ms"
    if answer.wait_ms == 0:
        return headers
    if answer.wait_ms is None:
        raise beyond_rates(caller, rates, headers)
    message = too_little_left(caller, rates, answer)
    wait_ms = answer.wait_ms
    if is_last_try:
        wait_ms = await gateway.refusals.refuse(caller.name, wait_ms)
    headers["retry-after"] = str(math.ceil(wait_ms / 1000))
    headers["retry-after-ms"] = str(wait_ms)
    raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
