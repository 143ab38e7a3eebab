"""Describes the headers and the body of an endpoint in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from promptq.producer.calls.call_body import HEADERS, BodyOptions, GeneratingOptions
from promptq.producer.http.stream import QUEUE_EVENTS
from promptq.shared.protocol.request import OutputPrefix, Request, SamplingParams

TOOL_FIELDS = frozenset({"tools", "tool_choice", "chat_template_kwargs"})
_HIDDEN = {"messages", "prompt", "trace_context", "embed", "tokenize"}


def operation(
    kind: type[BodyOptions], *, hidden: Set[str] = frozenset(), descriptions: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Returns the headers and the body of an endpoint, for FastAPI's argument `openapi_extra`.

    `hidden` has fields of a payload that the endpoint lacks or names differently. `descriptions`
    replaces the descriptions of some fields.
    """
    own = kind.model_json_schema()
    fields: dict[str, Any] = Request.model_json_schema()["properties"]
    fields["output_prefix"] = OutputPrefix.model_json_schema()
    hidden = hidden | _HIDDEN
    if not issubclass(kind, GeneratingOptions):
        hidden |= {*SamplingParams.model_fields, "resume", "output_prefix"}
    for name, description in descriptions.items():
        fields[name]["description"] = description
    rest = {name: value for name, value in fields.items() if name not in hidden}
    properties = {**rest, **own["properties"]}
    parameters = [
        _header(header, properties[name], f"the field `{name}`, if the body does not have it")
        for name, header in HEADERS.items()
        if name in properties
    ]
    if "stream" in properties:
        about = "with `stream`: continue after this event"
        parameters.append(_header("Last-Event-ID", {"type": "string"}, about))
        about = "if `1`, a stream has events `queue` with its place while it waits"
        parameters.append(_header(QUEUE_EVENTS, {"type": "string"}, about))
    required = own.get("required", [])
    schema = {"type": "object", "properties": properties, "required": required}
    body = {"content": {"application/json": {"schema": schema}}, "required": True}
    return {"parameters": parameters, "requestBody": body}


def any_of(operations: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the headers and the body of an endpoint that accepts any body of `operations`."""
    headers, schemas = dict[str, Any](), []
    for each in operations:
        headers |= {header["name"]: header for header in each["parameters"]}
        schemas.append(each["requestBody"]["content"]["application/json"]["schema"])
    body = {"content": {"application/json": {"schema": {"anyOf": schemas}}}, "required": True}
    return {"parameters": [*headers.values()], "requestBody": body}


def _header(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": schema, "description": description}
