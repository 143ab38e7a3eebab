"""Fields that clients of other servers send: those without effect, and other names of ours.

Fields of OpenAI's API and of vLLM's server are known here by name, so that a program that was
written for them need not be changed. A value that asks for what is not served is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from promptq.producer.calls.call import IGNORED, ONLY_VALUE, name_of_tool, tools_named
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.output_format import check_tools, wanted_output

_log = logging.getLogger("promptq.calls")  # a local batch has no other log


class FieldsWithoutEffect(BaseModel):
    """Accepted with any value of their type. The log names each of them once."""

    model_config = ConfigDict(strict=True)

    user: str | None = Field(None, description=IGNORED)
    store: bool | None = Field(None, description=IGNORED)
    service_tier: str | None = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=IGNORED)
    prompt_cache_key: str | None = Field(None, description=IGNORED)
    prompt_cache_retention: str | None = Field(None, description=IGNORED)
    prediction: dict[str, Any] | None = Field(None, description=IGNORED)
    verbosity: str | None = Field(None, description=IGNORED)
    spaces_between_special_tokens: bool | None = Field(None, description=IGNORED)
    early_stopping: bool | str | None = Field(None, description=IGNORED)
    length_penalty: float | None = Field(None, description=IGNORED)
    guided_decoding_backend: str | None = Field(None, description=IGNORED)

    def model_post_init(self, context: Any, /) -> None:
        for name in self.model_fields_set & _WITHOUT_EFFECT:
            warn_of(name)


_WITHOUT_EFFECT = {*FieldsWithoutEffect.model_fields, "parallel_tool_calls"}


class FixedFields(BaseModel):
    """Accepted with the only value that is served, which needs no word."""

    add_generation_prompt: Literal[True] | None = Field(None, description=ONLY_VALUE)
    continue_final_message: Literal[False] | None = Field(None, description=ONLY_VALUE)
    skip_special_tokens: Literal[True] | None = Field(None, description=ONLY_VALUE)
    include_stop_str_in_output: Literal[False] | None = Field(None, description=ONLY_VALUE)
    return_tokens_as_token_ids: Literal[False] | None = Field(None, description=ONLY_VALUE)
    use_beam_search: Literal[False] | None = Field(None, description=ONLY_VALUE)
    best_of: Literal[1] | None = Field(None, description=ONLY_VALUE)


@lru_cache(maxsize=len(FieldsWithoutEffect.model_fields))
def warn_of(field: str) -> None:
    """Log once in a process that calls have a field without effect."""
    _log.warning("a field of a call has no effect: %s", field)


def in_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body, with those that have other names elsewhere under ours.

    Raises InvalidRequestError for what is not served.
    """
    fields = {**given}
    if fields.get("seed") == -1:  # vLLM's word for none
        del fields["seed"]
    for name, instead in _FORMER.items():
        if name in fields:
            raise InvalidRequestError(
                f"{name}: is the former name of {instead}; send {instead}", field=name
            )
    newer = fields.get("structured_outputs")
    for kind, value in newer.items() if isinstance(newer, dict) else ():
        former = f"guided_{kind}"
        if former in fields and fields[former] == value:  # some clients send both names
            del fields[former]
    asked = [name for name in ("response_format", *_FORMS) if name in fields]
    if len(asked) > 1:
        raise InvalidRequestError(f"{asked[1]}: cannot be combined with {asked[0]}", field=asked[1])
    for name in asked:
        if name in _FORMS:
            fields["response_format"] = _format_of(name, fields.pop(name))
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        fields["tools"], fields["tool_choice"] = _allowed_tools(choice, fields.get("tools"))
    return fields


_FORMER = {"functions": "tools", "function_call": "tool_choice"}
_FORMS = (
    "structured_outputs",
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""Names of vLLM, the newer one first."""


def _format_of(name: str, given: Any) -> dict[str, Any]:
    """The `response_format` that asks for the same."""
    kind = name.removeprefix("guided_")
    if name == "structured_outputs":
        if isinstance(given, dict):  # vLLM's own class may be written out whole
            given = {key: value for key, value in given.items() if value is not None}
        if not (isinstance(given, dict) and len(given) == 1 and {*given} <= _KINDS):
            raise InvalidRequestError(
                f'{name}: must be one of {{"json": SCHEMA}}, {{"regex": TEXT}},'
                ' {"choice": [TEXT, ...]}, {"grammar": LARK} and {"json_object": true}; other forms'
                " are not served",
                field=name,
            )
        [(kind, given)] = given.items()
    if kind in ("regex", "choice", "grammar"):
        asked = {"type": kind, kind: given}
        try:
            wanted_output(asked, None, None)
        except ValueError as error:
            told = str(error).replace("response_format", name, 1)
            raise InvalidRequestError(told, field=name) from None
        return asked
    if kind == "json_object" and given is True:
        return {"type": "json_object"}
    if kind == "json" and isinstance(given, str):  # as vLLM takes it, too
        try:
            given = from_json(given)
        except ValueError as error:
            raise InvalidRequestError(
                f"{name}: the schema is not JSON: {error}", field=name
            ) from None
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{name}: the schema must be a JSON object", field=name)
    return {"type": "json_schema", "json_schema": {"name": name, "schema": given}}


_KINDS = {"json", "json_object", "regex", "choice", "grammar"}


def _allowed_tools(choice: Mapping[str, Any], tools: Any) -> tuple[list[Any], str]:
    """The tools that are allowed, and whether one of them must be called.

    A tool that may not be called is not shown to the model either.
    """
    allowed = choice.get("allowed_tools", choice)
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise InvalidRequestError(
            'tool_choice: allowed_tools must be like {"mode": "auto" or "required", "tools":'
            ' [{"type": "function", "function": {"name": ...}}]}',
            field="tool_choice",
        )
    tools = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    try:
        check_tools(tools)  # also those that are not shown
    except ValueError as error:
        raise InvalidRequestError(str(error), field="tools") from None
    return tools_named([name_of_tool(tool) for tool in listed], tools), mode
