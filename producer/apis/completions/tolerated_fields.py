"""Fields of OpenAI's API and of vLLM's server that have no effect or another name in promptq.

Programs for that API and that server work unchanged. A value for an unsupported feature is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import from_json

from promptq.producer.calls.call_body import (
    IGNORED,
    ONLY_VALUE,
    name_of_tool,
    tools_named,
    wrong_field,
)
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.output_format import IF_NOT_STRICT, check_tools, wanted_output

_log = logging.getLogger("promptq.calls")  # local batches may lack structlog


class FieldsWithoutEffect(BaseModel):
    """Accepted fields without effect. Only a value's type is checked. Each field is logged once."""

    model_config = ConfigDict(strict=True)

    user: str | None = Field(None, description=IGNORED)
    store: bool | None = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=IGNORED)
    prompt_cache_retention: str | None = Field(None, description=IGNORED)
    prediction: dict[str, Any] | None = Field(None, description=IGNORED)
    verbosity: str | None = Field(None, description=IGNORED)
    spaces_between_special_tokens: bool | None = Field(None, description=IGNORED)
    early_stopping: bool | str | None = Field(None, description=IGNORED)
    length_penalty: float | None = Field(None, description=IGNORED)
    guided_decoding_backend: str | None = Field(None, description=IGNORED)

    @model_validator(mode="after")
    def _log_those_without_effect(self) -> Self:
        for name in self.model_fields_set & _WITHOUT_EFFECT:
            warn_of(name)
        return self


_WITHOUT_EFFECT = {*FieldsWithoutEffect.model_fields, "parallel_tool_calls"}


class FixedFields(BaseModel):
    """Fields that have only one accepted value."""

    add_generation_prompt: Literal[True] | None = Field(None, description=ONLY_VALUE)
    continue_final_message: Literal[False] | None = Field(None, description=ONLY_VALUE)
    skip_special_tokens: Literal[True] | None = Field(None, description=ONLY_VALUE)
    include_stop_str_in_output: Literal[False] | None = Field(None, description=ONLY_VALUE)
    return_tokens_as_token_ids: Literal[False] | None = Field(None, description=ONLY_VALUE)
    use_beam_search: Literal[False] | None = Field(None, description=ONLY_VALUE)
    best_of: Literal[1] | None = Field(None, description=ONLY_VALUE)


@lru_cache(maxsize=len(FieldsWithoutEffect.model_fields))
def warn_of(field: str) -> None:
    """Logs a warning that this field of calls has no effect. Logs each field only once."""
    _log.warning("a field of a call has no effect: %(field)s", {"field": field})


def in_our_names(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a body with promptq's names of fields in place of vLLM's names. Keeps only the tools
    that `tool_choice` allows.

    Raises InvalidRequestError for `functions` and `function_call` (OpenAI's former names of `tools`
    and `tool_choice`), and for an unsupported feature.
    """
    fields = {**body}
    if fields.get("seed") == -1:  # to vLLM, this means no seed
        del fields["seed"]
    for name, instead in _FORMER.items():
        if name in fields:
            raise wrong_field(name, f"is the former name of {instead}; send {instead}")
    newer = fields.get("structured_outputs")
    for kind, value in newer.items() if isinstance(newer, dict) else ():
        older = f"guided_{kind}"
        if older in fields and fields[older] == value:  # some clients send both
            del fields[older]
    formats = [name for name in ("response_format", *_FORMS) if name in fields]
    if len(formats) > 1:
        raise wrong_field(formats[1], f"cannot be combined with {formats[0]}")
    for name in formats:
        if name in _FORMS:
            fields["response_format"] = _format_of(name, fields.pop(name))
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        fields["tools"], fields["tool_choice"] = _allowed_tools(choice, fields.get("tools"))
    return fields


def names_in(body: Mapping[str, Any]) -> dict[str, str]:
    """Maps `response_format` to the body's name for this field, such as `guided_json`, for error
    messages (see `in_api_names`). Returns {} if the body has no such name."""
    name = next((name for name in _FORMS if name in body), None)
    if name is None:
        return {}
    schema = ".json" if name == "structured_outputs" else ""
    advice = IF_NOT_STRICT.replace("send", "send response_format with", 1)
    return {"response_format": name, ".json_schema.schema": schema, IF_NOT_STRICT: advice}


_FORMER = {"functions": "tools", "function_call": "tool_choice"}
_FORMS = (
    "structured_outputs",
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)  # the newest first


def _format_of(name: str, value: Any) -> dict[str, Any]:
    kind = name.removeprefix("guided_")
    if name == "structured_outputs":
        if isinstance(value, dict):  # clients may also send the fields that are not set
            value = {key: member for key, member in value.items() if member not in _UNSET}
        if not (isinstance(value, dict) and len(value) == 1 and {*value} <= _KINDS):
            members = ", ".join(value)[:80] if isinstance(value, dict) and value else "none"
            raise wrong_field(
                name,
                'must be one of {"json": SCHEMA}, {"regex": TEXT}, {"choice": [TEXT, ...]},'
                f' {{"grammar": LARK}} and {{"json_object": true}}; got the members {members}',
            )
        [(kind, value)] = value.items()
    if kind in ("regex", "choice", "grammar"):
        response_format = {"type": kind, kind: value}
        try:
            wanted_output(response_format, None, None)
        except ValueError as error:
            message = str(error).replace("response_format", name, 1)
            raise InvalidRequestError(message, field=name) from None
        return response_format
    if kind == "json_object" and value is True:
        return {"type": "json_object"}
    if kind == "json" and isinstance(value, str):  # vLLM accepts this, too
        try:
            value = from_json(value)
        except ValueError as error:
            raise wrong_field(name, f"the schema is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise wrong_field(name, "the schema must be a JSON object")
    return {"type": "json_schema", "json_schema": {"name": name, "schema": value}}


_UNSET = (None, False)
_KINDS = {"json", "json_object", "regex", "choice", "grammar"}


def _allowed_tools(choice: Mapping[str, Any], tools: Any) -> tuple[list[Any], str]:
    """Returns the tools that a `tool_choice` allows, and its mode: `auto` or `required`."""
    allowed = choice.get("allowed_tools", choice)
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise wrong_field(
            "tool_choice",
            'allowed_tools must be like {"mode": "auto" or "required", "tools":'
            ' [{"type": "function", "function": {"name": ...}}]}',
        )
    tools = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    try:
        check_tools(tools)  # also those that the model does not see
    except ValueError as error:
        raise InvalidRequestError(str(error), field="tools") from None
    return tools_named([name_of_tool(tool) for tool in listed], tools), mode
