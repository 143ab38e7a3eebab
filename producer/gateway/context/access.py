"""Who calls, and how much they may ask for."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Annotated, Any

from fastapi import Depends, Request

from promptq.producer.admin import api_keys
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.gateway.context.gateway import Gateway, ThisGateway
from promptq.producer.gateway.http.errors import NOT_AGAIN, ApiError
from promptq.shared.protocol.request import MAX_PRIORITY, TokenAccount
from promptq.shared.queue.rate_limits import Rate, RateAnswer, take_of_rates

Caller = ApiKey
"""A caller is described by what their key allows."""

_NOBODY = Caller(name=api_keys.LOCAL_NAME, highest_priority=-MAX_PRIORITY, is_admin=True)
_FORWARDED = (
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
    "via",
    "cf-connecting-ip",
)
"""Headers that proxies add. A proxy that adds none of them looks like a client."""
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9.-]+))(?::[0-9]{1,5})?", re.IGNORECASE)
_MINUTE_MS = 60_000
_OWN_PAGES = ("same-origin", "none")
"""`Sec-Fetch-Site` of requests by a page of this gateway, and of addresses that people typed."""


async def caller_of(gateway: ThisGateway, request: Request) -> Caller:
    """What the key of a call allows. While no key exists, this machine may do everything.

    Raises ApiError 401.
    """
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and secret:
        secret = secret.strip()
        key = await gateway.queue.run(api_keys.look_up(gateway.keys, secret))
        if key is not None:
            if key.is_over(time.time() * 1000):
                raise _unauthorised(f"the API key {key.name!r} has expired")
            await gateway.key_uses.note(secret)
            return key
    num_keys = await gateway.queue.run(api_keys.count(gateway.keys))
    if num_keys == 0:
        if _is_from_this_machine(request):
            return _NOBODY
        raise _unauthorised(
            "there is no API key yet, so only this machine is answered; make one with"
            " `promptq keys create NAME`"
        )
    raise _unauthorised(
        "the API key is unknown or was revoked"
        if scheme.lower() == "bearer" and secret
        else "an API key is needed: Authorization: Bearer KEY"
    )


async def admin_of(caller: ThisCaller) -> Caller:
    """A caller that may see and steer the whole queue. Raises ApiError 403 for others."""
    if not caller.is_admin:
        raise ApiError(
            403, f"the key {caller.name!r} may not do this: it needs one made with --admin"
        )
    return caller


ThisCaller = Annotated[Caller, Depends(caller_of)]
"""A route's parameter of this type is its caller. A route without it is open to anybody."""

ThisAdmin = Annotated[Caller, Depends(admin_of)]


def needs(scope: str) -> Any:
    """A dependency for routers whose calls need a key with this scope. Raises ApiError 403."""

    async def check(caller: ThisCaller) -> None:
        check_scope(caller, scope)

    return Depends(check)


def check_scope(caller: Caller, scope: str) -> None:
    """Raises ApiError 403 if the caller's key does not have the scope."""
    if caller.scopes is not None and scope not in caller.scopes:
        has = ", ".join(caller.scopes)
        raise ApiError(
            403,
            f"the key {caller.name!r} may not do this: it needs the scope {scope!r} and has {has}",
            code="scope",
        )


async def admit_call(gateway: Gateway, caller: Caller) -> dict[str, str]:
    """As `take`, for one request, before the body of a call is read."""
    return await take(gateway, caller, _rate_of_requests(caller, 1))


async def take(
    gateway: Gateway, caller: Caller, rates: Sequence[Rate], *, is_last_try: bool = True
) -> dict[str, str]:
    """Take from the caller's rates. Gives the headers that report them.

    Raises ApiError 429. With `is_last_try` that is delayed for callers who come back too early.
    """
    if not rates:
        return {}
    answer = await gateway.queue.run(take_of_rates(caller.name, rates))
    headers = {}
    for rate in rates:
        headers[f"x-ratelimit-limit-{rate.name}"] = str(rate.limit)
        headers[f"x-ratelimit-remaining-{rate.name}"] = str(answer.remaining[rate.name])
        headers[f"x-ratelimit-reset-{rate.name}"] = f"{answer.reset_ms[rate.name]}ms"
    if answer.wait_ms == 0:
        return headers
    if answer.wait_ms is None:
        raise beyond_rates(caller, rates, headers)
    message = _too_little_left(caller, rates, answer)
    wait_ms = answer.wait_ms
    if is_last_try:
        wait_ms = await gateway.refusals.refuse(caller.name, wait_ms)
    headers["retry-after"] = str(math.ceil(wait_ms / 1000))
    headers["retry-after-ms"] = str(wait_ms)
    raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def _too_little_left(caller: Caller, rates: Sequence[Rate], answer: RateAnswer) -> str:
    said = []
    for rate in rates:
        left, limit = answer.remaining[rate.name], f"{rate.limit} {rate.name} a minute"
        if answer.reset_ms[rate.name] > _MINUTE_MS:
            said.append(f"has used more than its {limit}")
        elif left < rate.amount:
            said.append(f"has {left} left of its {limit}, and this needs {rate.amount}")
    seconds = math.ceil((answer.wait_ms or 0) / 1000)
    after = f"{seconds} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"
    return f"the key {caller.name!r} {' and '.join(said)}; try again in {after}"


def rates_of(caller: Caller, requests: Sequence[Mapping[str, Any]]) -> list[Rate]:
    """What requests take of their caller's rates; `requests` are as for `Client.enqueue_many`.

    The tokens taken are those of the prompt, estimated as a quarter of the payload's bytes. Output
    is charged to the account (`account_of`) while it is generated.
    """
    rates = _rate_of_requests(caller, len(requests))
    if caller.tokens_per_minute:
        tokens = sum(_prompt_tokens(request) for request in requests)
        rates.append(Rate("tokens", tokens, caller.tokens_per_minute))
    return rates


def account_of(caller: Caller, holder: str) -> TokenAccount | None:
    """The account to which the output of a caller's requests is charged.

    `holder` is the name under which rates are taken. None if the caller has no limit.
    """
    limit = caller.tokens_per_minute
    return TokenAccount(holder, limit) if limit else None


def _rate_of_requests(caller: Caller, amount: int) -> list[Rate]:
    limit = caller.requests_per_minute
    return [Rate("requests", amount, limit)] if limit else []


def beyond_rates(
    caller: Caller, rates: Sequence[Rate], headers: dict[str, str] | None = None
) -> ApiError:
    """The answer to a call that needs more than a whole minute allows."""
    needed = " and ".join(f"{rate.amount} {rate.name}" for rate in rates)
    return ApiError(
        429,
        f"this needs {needed}, and the key {caller.name!r} never has more than {_limits(rates)}",
        code="rate_limit_exceeded",
        headers={**(headers or {}), **NOT_AGAIN},
    )


def _limits(rates: Sequence[Rate]) -> str:
    return " and ".join(f"{rate.limit} {rate.name} a minute" for rate in rates)


def _prompt_tokens(request: Mapping[str, Any]) -> int:
    return len(json.dumps(request, default=str)) // 4


def _unauthorised(message: str) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers)


def is_of_own_page(request: Request) -> bool:
    """Whether no header shows that a page of another origin sent it, even one of this machine."""
    site = request.headers.get("sec-fetch-site", "none")
    own = f"{request.scope['scheme']}://{request.headers.get('host', '')}".lower()
    origins = request.headers.getlist("origin")
    return site in _OWN_PAGES and all(origin.lower() == own for origin in origins)


def _is_from_this_machine(request: Request) -> bool:
    """Whether nothing shows another machine, a proxy, or a page of another site in a browser."""
    if any(name in request.headers for name in _FORWARDED):
        return False
    if request.client is not None and not _is_loopback(request.client.host):
        return False
    hosts = request.headers.getlist("host")
    return len(hosts) == 1 and _names_this_machine(hosts[0]) and is_of_own_page(request)


def _names_this_machine(host: str) -> bool:
    """Whether a Host header names this machine. False for rebound and malformed names."""
    found = _HOST.fullmatch(host)
    name = (found[1] or found[2]).lower() if found else ""
    return name == "localhost" or _is_loopback(name)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
