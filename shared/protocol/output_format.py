"""The form of output that a request requires: any text, JSON, a pattern, or a tool call.

The fields are those of OpenAI's API, with three more types: `regex`, `choice` and `grammar`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from reprlib import repr as shown
from typing import Any

ANY_OBJECT: dict[str, Any] = {"type": "object"}
IF_NOT_STRICT = ', or send "strict": false, which ignores it'
"""The end of an error message about a keyword that is wrong only if `strict` is true."""

MAX_CHOICES = 1000
"""The most texts in a `choice`. The limit bounds the cost of preparing a request."""

MAX_PARAMETERS = 16_384
"""The most parameters of all tools of a request together. Each parser of the model's answer stores
the types of all parameters."""

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class JsonOutput:
    """JSON that matches a schema. If not `strict`, unknown keywords in the schema are ignored."""

    schema: dict[str, Any]
    strict: bool
    field: str = "response_format"


@dataclass(frozen=True, slots=True)
class RegexOutput:
    """Text that must match a regular expression from its beginning to its end."""

    regex: str
    field: str = "response_format"


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """Text that must be exactly one of these texts."""

    texts: tuple[str, ...]
    field: str = "response_format"


@dataclass(frozen=True, slots=True)
class GrammarOutput:
    """Text that a Lark grammar derives from its rule `start`."""

    grammar: str
    field: str = "response_format"


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool that the model may call. `parameters` is the schema of its arguments, and `place` is
    the path of this schema in the request, for error messages."""

    name: str
    parameters: dict[str, Any]
    strict: bool
    place: str = "tools"


@dataclass(frozen=True, slots=True)
class ToolCallOutput:
    """A call of one of these tools.

    `is_begun` is true if a worker of an earlier release has already written the beginning of the
    call. For some model families, earlier releases wrote calls in another form.
    """

    tools: tuple[ToolSchema, ...]
    field: str = "tools"
    is_begun: bool = False


Output = JsonOutput | RegexOutput | ChoiceOutput | GrammarOutput | ToolCallOutput


def wanted_output(
    response_format: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
) -> Output | None:
    """Returns the output that the three fields together require; None if any text is allowed.

    If a tool call is required, `response_format` has no effect, because a call is not text.

    Raises ValueError. The message begins with the name of the field that is wrong.
    """
    of_text = _text_output(response_format)
    if tool_choice in (None, "auto", "none"):
        return of_text
    if not tools:
        raise ValueError("tool_choice: needs tools, and there are none")
    if tool_choice == "required":
        return ToolCallOutput(tuple(starmap(_tool_schema, enumerate(tools))))
    name = _named_function(tool_choice)
    for index, tool in enumerate(tools):
        schema = _tool_schema(index, tool)
        if schema.name == name:
            return ToolCallOutput((schema,))
    raise ValueError(f"tool_choice: names the function {name!r}, which is not among the tools")


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if a tool with a type is not a function with a name. Also raises ValueError
    if all tools together have too many parameters.

    A tool without a type is accepted, because some models' chat templates expect such tools.
    """
    if (count := sum(map(_num_parameters, tools))) > MAX_PARAMETERS:
        raise ValueError(
            f"tools: {count} parameters are more than the {MAX_PARAMETERS} allowed in all"
        )
    for tool in tools:
        if tool.get("type", "function") != "function":
            kind = str(tool["type"])[:80]
            raise ValueError(f"tools: a tool of type {kind!r} is not served, only functions are")
        if "type" in tool:
            _function_of(tool)


def _num_parameters(tool: Any) -> int:
    for name in ("function", "parameters", "properties"):
        tool = tool.get(name) if isinstance(tool, Mapping) else None
    return len(tool) if isinstance(tool, Mapping) else 0


def _text_output(
    response_format: Mapping[str, Any] | None,
) -> JsonOutput | RegexOutput | ChoiceOutput | GrammarOutput | None:
    if response_format is None:
        return None
    kind = response_format.get("type")
    if not (isinstance(kind, str) and kind in _TYPES):
        raise ValueError(f"response_format: type {shown(kind)} is not one of {', '.join(_TYPES)}")
    _refuse_unknown(response_format, {"type", _TYPES[kind]} - {""}, "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonOutput(ANY_OBJECT, strict=True)
    value = response_format.get(_TYPES[kind])
    if kind == "json_schema":
        return _schema_output(value)
    if kind == "regex":
        if not isinstance(value, str) or not value:
            raise ValueError("response_format: regex must be a text with a regular expression")
        return RegexOutput(value)
    if kind == "grammar":
        return _grammar_output(value)
    if not (
        isinstance(value, list)
        and 0 < len(value) <= MAX_CHOICES
        and all(name and isinstance(name, str) for name in value)
    ):
        raise ValueError(
            f"response_format: choice must be a list of 1 to {MAX_CHOICES:,} texts, none of them"
            " empty"
        )
    return ChoiceOutput(tuple(value))


_TYPES = {
    "text": "",
    "json_object": "",
    "json_schema": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""For each type of `response_format`, the key of the type's details; empty if there are none."""


def _grammar_output(grammar: Any) -> GrammarOutput:
    if not isinstance(grammar, str) or not grammar.strip():
        raise ValueError("response_format: grammar must be a text with a grammar in Lark")
    if _GBNF_RULE.search(grammar):
        raise ValueError(
            "response_format: the grammar is in GBNF or EBNF (`::=`), but Lark is needed: its rules"
            " are like `start: ...`"
        )
    return GrammarOutput(grammar)


_GBNF_RULE = re.compile(r"^[ \t]*<?[\w-]+>?[ \t]*::=", re.MULTILINE)


def _schema_output(described: Any) -> JsonOutput:
    where = "response_format: json_schema"
    if not isinstance(described, Mapping):
        raise ValueError(f'{where}: must be an object like {{"name": ..., "schema": {{...}}}}')
    _refuse_unknown(described, {"name", "description", "schema", "strict"}, where)
    schema = described.get("schema")
    if not isinstance(schema, dict):
        raise ValueError(f"{where}: schema must be an object, a JSON schema")
    return JsonOutput(schema, strict=_strict(described, where))


def _named_function(tool_choice: str | Mapping[str, Any] | None) -> str:
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        function = tool_choice.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return str(function["name"])
    raise ValueError(
        f"tool_choice: {shown(tool_choice)} is not one of auto, none, required or"
        ' {"type": "function", "function": {"name": ...}}'
    )


def _function_of(tool: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise ValueError(
            'tools: each must be like {"type": "function", "function": {"name": ...,'
            ' "parameters": {...}}}'
        )
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("tools: a function has no name")
    return function, name


def _tool_schema(index: int, tool: Mapping[str, Any]) -> ToolSchema:
    function, name = _function_of(tool)
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        parameters = NO_ARGUMENTS
    elif not isinstance(parameters, dict):
        raise ValueError(f"tools: the parameters of {name!r} must be an object, a JSON schema")
    kinds = parameters.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ValueError(
            f"tools: the parameters of {name!r} must have the type 'object', got {shown(kinds)}"
        )
    strict = _strict(function, f"tools: function {name!r}")
    return ToolSchema(name, parameters, strict, f"tools[{index}].function.parameters")


def _strict(described: Mapping[str, Any], where: str) -> bool:
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"{where}: strict must be true, false or null, not {shown(strict)}")
    return strict is not False


def _refuse_unknown(fields: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in fields:
        if name not in known:
            raise ValueError(f"{where}: {name!r} is not known; known are {sorted(known)}")
