"""Identifies the caller of an HTTP request by its API key."""

from __future__ import annotations

import re
import time
from ipaddress import ip_address
from typing import Annotated, Any

from fastapi import Depends, Request

from promptq.producer.admin import api_keys
from promptq.producer.calls.caller import Caller, check_scope
from promptq.producer.calls.errors import ApiError
from promptq.producer.http.state import ThisGateway
from promptq.shared.protocol.request import MAX_PRIORITY

_LOCAL_ADMIN = Caller(name=api_keys.LOCAL_NAME, highest_priority=-MAX_PRIORITY, is_admin=True)
_FORWARDED = (
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
    "via",
    "cf-connecting-ip",
)
"""Headers that proxies add. A proxy that adds none of them looks to the gateway like a client."""
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9.-]+))(?::[0-9]{1,5})?", re.IGNORECASE)
_OWN_PAGES = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` for requests from this gateway's pages, and for typed addresses."""


async def caller_of(gateway: ThisGateway, request: Request) -> Caller:
    """Returns the caller, by the API key of the request. While no key exists, callers on this
    machine are administrators. Raises ApiError 401."""
    secret = _secret_of(request)
    if secret:
        key = await gateway.queue.run(api_keys.look_up(gateway.keys, secret))
        if key is not None:
            if key.is_over(time.time() * 1000):
                raise _unauthorised(f"the API key {key.name!r} has expired")
            await gateway.key_uses.note(secret)
            return key
    num_keys = await gateway.queue.run(api_keys.count(gateway.keys))
    if num_keys == 0:
        if _is_from_this_machine(request):
            return _LOCAL_ADMIN
        raise _unauthorised(
            "there is no API key yet, so the gateway answers only this machine; create a key with"
            " `promptq keys create NAME`"
        )
    raise _unauthorised(
        "the API key is unknown or was revoked"
        if secret
        else "an API key is needed: Authorization: Bearer KEY, X-Api-Key: KEY or Api-Key: KEY"
    )


def _secret_of(request: Request) -> str:
    """Returns the API key in the headers that OpenAI's, Anthropic's or Azure's clients send,
    otherwise ''. A page of another site can send none of these headers without a CORS preflight."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    return (request.headers.get("x-api-key") or request.headers.get("api-key", "")).strip()


async def admin_of(caller: ThisCaller) -> Caller:
    """Returns the caller if its key is an administrator's, which may read and control the whole
    queue. Otherwise raises ApiError 403."""
    if not caller.is_admin:
        raise ApiError(
            403, f"the key {caller.name!r} may not do this: the call needs a key made with --admin"
        )
    return caller


ThisCaller = Annotated[Caller, Depends(caller_of)]
"""Type of a route's parameter that receives the caller. Routes without a caller need no API key."""

ThisAdmin = Annotated[Caller, Depends(admin_of)]
"""Type of a route's parameter that receives the caller, which must be an administrator."""


def needs(scope: str) -> Any:
    """Returns a dependency that raises ApiError 403 if the caller's key lacks this scope."""

    async def check(caller: ThisCaller) -> None:
        check_scope(caller, scope)

    return Depends(check)


def _unauthorised(message: str) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers)


def is_of_own_page(request: Request) -> bool:
    """Returns False if a page of another origin sent the request, otherwise True. An origin
    includes the port, so another server on this machine is another origin."""
    site = request.headers.get("sec-fetch-site", "none")
    own = f"{request.scope['scheme']}://{request.headers.get('host', '')}".lower()
    origins = request.headers.getlist("origin")
    return site in _OWN_PAGES and all(origin.lower() == own for origin in origins)


def _is_from_this_machine(request: Request) -> bool:
    """Returns whether the request comes from this machine, and neither through a proxy nor from
    another site's page in a browser."""
    if any(name in request.headers for name in _FORWARDED):
        return False
    if request.client is not None and not _is_loopback(request.client.host):
        return False
    hosts = request.headers.getlist("host")
    return len(hosts) == 1 and _names_this_machine(hosts[0]) and is_of_own_page(request)


def _names_this_machine(host: str) -> bool:
    """Returns whether a Host header names this machine. Returns False for a malformed header, and
    for another name that resolves to this machine (DNS rebinding)."""
    match = _HOST.fullmatch(host)
    name = (match[1] or match[2]).lower() if match else ""
    return name == "localhost" or _is_loopback(name)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
