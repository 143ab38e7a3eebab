"""Reads bodies that a pydantic model describes, after the caller was identified.

FastAPI would read a body of any size before it knows the caller, and report every error in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, TypeAdapter, ValidationError

from promptq.producer.calls.call_body import read_object
from promptq.producer.calls.errors import ApiError
from promptq.producer.http.auth import ThisCaller
from promptq.producer.http.bodies import read_body
from promptq.producer.http.state import ThisGateway

_MOST_BYTES = 262_144
"""The most bytes of a body. The event loop parses bodies, so each must be quick to parse."""
_MOST_FIELDS = 100
"""The most fields of a body. Reports of unknown fields, one for each, would otherwise take long."""


def json_body(kind: Any) -> Callable[..., Awaitable[Any]]:
    """Returns a dependency of routes that reads the body as JSON of this model or type. The
    dependency raises ApiError, InvalidRequestError or RequestValidationError."""
    adapter = TypeAdapter(kind)

    async def read(request: Request, gateway: ThisGateway, caller: ThisCaller) -> Any:
        with gateway.bodies.hold(caller.party) as hold:
            most = min(_MOST_BYTES, gateway.settings.http_max_body_bytes)
            fields = read_object(await read_body(request, most, hold))
        if len(fields) > _MOST_FIELDS:
            raise ApiError(400, f"the body has {len(fields)} fields, more than {_MOST_FIELDS}")
        try:
            return adapter.validate_python(fields)
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_url=False)[:1]) from None

    return read


def described_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Returns the description of a route's body, without `$ref`s, for FastAPI's `openapi_extra`."""
    schema = kind.model_json_schema()
    inner = schema.pop("$defs", {})

    def in_place(part: Any) -> Any:
        if isinstance(part, list):
            return [in_place(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return in_place(inner[part["$ref"].rpartition("/")[2]])
        return {name: in_place(each) for name, each in part.items()}

    content = {"application/json": {"schema": in_place(schema)}}
    return {"requestBody": {"content": content, "required": True}}
