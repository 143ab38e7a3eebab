"""Checks the rights of callers."""

from __future__ import annotations

from typing import Any

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.calls.errors import ApiError

Caller = ApiKey
"""The caller of an API: its API key with the key's rights."""


def check_scope(caller: Caller, scope: str) -> None:
    """Raises ApiError 403 if the caller's key does not have the scope."""
    if caller.scopes is not None and scope not in caller.scopes:
        has = ", ".join(caller.scopes)
        message = f"may not do this: it needs the scope {scope!r} and has {has}"
        raise ApiError(403, f"the key {caller.name!r} {message}", code="scope")


def check_model(caller: Caller, model: str) -> None:
    """Raises ApiError 403 if the caller's key may not use the model."""
    if caller.models is not None and model not in caller.models:
        has = ", ".join(map(repr, caller.models))
        raise _wrong(
            "model", f"the key {caller.name!r} may not use {model[:200]!r}; it may use {has}"
        )


def check_tenant(caller: Caller, tenant: Any) -> None:
    """Raises ApiError 403 if the caller's key may not act for the tenant."""
    if tenant != caller.tenant and not caller.is_free:
        raise _wrong("tenant", f"{tenant!r} is not the tenant of this API key")


def check_priority(caller: Caller, priority: int) -> None:
    """Raises ApiError 403 if the priority is more urgent than the caller's key allows."""
    if priority < (highest := caller.highest_priority):
        message = f"{priority} is more urgent than {highest}, the most urgent that this API key"
        raise _wrong("priority", f"{message} allows")


def _wrong(field: str, message: str) -> ApiError:
    return ApiError(403, f"{field}: {message}", param=field, code=field)
