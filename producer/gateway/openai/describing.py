"""The endpoints of completions and chats, as the API's description has them."""

from __future__ import annotations

from typing import Any

from producer.gateway.errors import described
from producer.gateway.openai.calls import (
    DEFAULT_MAX_TOKENS,
    HEADERS,
    CallOptions,
    CompletionOptions,
)
from shared.schemas import Request

ERRORS = described(400, 401, 403, 404, 408, 409, 413, 429, 500, 503)


def operation(kind: type[CallOptions]) -> dict[str, Any]:
    """The headers and the body of an endpoint, for FastAPI's `openapi_extra`."""
    schema = _body_schema(kind)
    parameters = [
        _header(header, schema["properties"][name], f"the field `{name}`, if the body has none")
        for name, header in HEADERS.items()
    ]
    again = _header("Last-Event-ID", {"type": "string"}, "with `stream`: go on behind this event")
    body = {"content": {"application/json": {"schema": schema}}, "required": True}
    return {"parameters": [*parameters, again], "requestBody": body}


def _header(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": schema, "description": description}


def _body_schema(kind: type[CallOptions]) -> dict[str, Any]:
    """The endpoint's options and the fields of a payload."""
    own = kind.model_json_schema()
    fields: dict[str, Any] = Request.model_json_schema()["properties"]
    hidden = {"messages", "prompt", "trace_context"}
    if kind is CompletionOptions:
        hidden |= {"tools", "tool_choice", "chat_template_kwargs"}
        fields["max_tokens"]["description"] = f"left out: {DEFAULT_MAX_TOKENS}"
    rest = {name: value for name, value in fields.items() if name not in hidden}
    properties = {**rest, **own["properties"]}
    required = own.get("required", [])
    return {"type": "object", "properties": properties, "required": required}
