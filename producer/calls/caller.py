"""Checks a caller's rights."""

from __future__ import annotations

from typing import Any

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.calls.errors import ApiError

Caller = ApiKey
"""The caller of a call: the API key with its rights."""


def check_scope(caller: Caller, scope: str) -> None:
    """Raises ApiError 403 if the caller's key does not have the scope."""
    if caller.scopes is not None and scope not in caller.scopes:
        has = ", ".join(caller.scopes)
        raise ApiError(
            403,
            f"the key {caller.name!r} may not do this: it needs the scope {scope!r} and has {has}",
            code="scope",
        )


def check_model(caller: Caller, model: str) -> None:
    """Raises ApiError 403 if the caller's key may not use the model."""
    if caller.models is not None and model not in caller.models:
        has = ", ".join(map(repr, caller.models))
        raise ApiError(
            403,
            f"model: the key {caller.name!r} may not use {model[:200]!r}; it may use {has}",
            param="model",
            code="model",
        )


def check_tenant(caller: Caller, tenant: Any) -> None:
    """Raises ApiError 403 if the caller's key may not act for the tenant."""
    if tenant != caller.tenant and not caller.is_free:
        raise ApiError(
            403,
            f"tenant: {tenant!r} is not the tenant of this API key",
            param="tenant",
            code="tenant",
        )


def check_priority(caller: Caller, priority: int) -> None:
    """Raises ApiError 403 if the priority is more urgent than the caller's key allows."""
    if priority < caller.highest_priority:
        raise ApiError(
            403,
            f"priority: {priority} is more urgent than {caller.highest_priority}, the most urgent"
            " that this API key allows",
            param="priority",
            code="priority",
        )
