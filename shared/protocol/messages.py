"""Converts messages from the form of OpenAI's clients to the form that chat templates expect."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from promptq.shared.protocol.pictures import data_url, is_picture, picture_part

MAX_ARGUMENT_VALUES = 100_000
"""The most JSON values in the arguments of all tool calls in a request's messages. The limit bounds
memory, because the parser builds an object for each value."""

_LONGEST_SHOWN = 80
_ROLES = {"developer": "system", "function": "tool"}
"""Maps roles of OpenAI's API to their names in chat templates, where the two names differ."""
_REASONING = frozenset({"reasoning", "reasoning_content"})
_CUT = "EOF while parsing"  # in the parser's error for JSON that ends too early

# An unfinished string matches to the end of the text: a search at each quotation mark is slow.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_SEPARATORS = ",[{"


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages in the form that chat templates expect.

    Content becomes one text, or a list of parts if it has pictures. Arguments of tool calls become
    objects. A `function_call` (the former name) becomes a tool call. Raises ValueError, which names
    the wrong part.
    """
    num_values = 0
    clean = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        fields = {name: value for name, value in message.items() if value is not None}
        role = fields.get("role")
        if not isinstance(role, str):
            raise ValueError(f"{where}.role: must be a text such as 'user', got {_shown(role)}")
        fields["role"] = _ROLES.get(role, role)
        fields["content"] = _content(f"{where}.content", fields.get("content"))
        for name in _REASONING & fields.keys():
            if not isinstance(fields[name], str):
                raise ValueError(f"{where}.{name}: must be text, got {_shown(fields[name])}")
        calls = fields.pop("tool_calls", [])
        if not isinstance(calls, list):
            raise ValueError(f"{where}.tool_calls: must be a list, got {_shown(calls)}")
        places = [f"{where}.tool_calls[{number}].function" for number in range(len(calls))]
        former = fields.pop("function_call", None)
        if former is not None and not calls:
            calls = [{"type": "function", "function": former}]
            places = [f"{where}.function_call"]
        if calls:
            fields["tool_calls"] = clean_calls = []
            for place, call in zip(places, calls, strict=True):
                function = _function(place, call)
                num_values += _num_values(function["arguments"])
                if num_values > MAX_ARGUMENT_VALUES:
                    raise ValueError(
                        f"{place}.arguments: the arguments that are texts, up to this one, hold"
                        f" more than {MAX_ARGUMENT_VALUES} JSON values"
                    )
                function["arguments"] = _object(f"{place}.arguments", function["arguments"])
                clean_calls.append({**call, "function": function})
        clean.append(fields)
    return clean


def _content(where: str, content: Any) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: must be text or a list of parts, got {_shown(content)}")
    parts: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if is_picture(part):
            parts += *_joined(texts), _picture(place, part.get("image_url"))
            texts = []
        else:
            texts.append(_text(place, part))
    return [*parts, *_joined(texts)] if parts else "".join(texts)


def _joined(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns a list with one part, the joined texts; an empty list if they are empty."""
    return [{"type": "text", "text": text}] if (text := "".join(texts)) else []


def _picture(place: str, url: Any) -> dict[str, Any]:
    """Returns a part with a picture, without members that have no effect, such as `detail`. The
    Python client may pass the picture's bytes or file as URL. Raises OSError for a file."""
    url = url.get("url") if isinstance(url, Mapping) else url
    if isinstance(url, Path):
        url = url.read_bytes()
    if isinstance(url, bytes):
        try:
            url = data_url(url)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    if not isinstance(url, str):
        raise ValueError(
            f'{place}: must be like {{"type": "image_url", "image_url": {{"url": URL}}}}'
        )
    return picture_part(url)


def _text(place: str, part: Any) -> str:
    text, kind = part, None
    if isinstance(part, Mapping):
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
    if isinstance(text, str):
        return text
    if kind in (None, "text", "refusal"):
        name = kind or "text"
        raise ValueError(
            f'{place}: must be like {{"type": "{name}", "{name}": TEXT}}, got {_shown(part)}'
            + (f" with {_shown(text)} as {name}" if isinstance(part, Mapping) else "")
        )
    raise ValueError(
        f"{place}: a part of type {_shown(kind)} is not served, only text and image_url are"
    )


def _function(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(
            f"{where}: must be an object with name and arguments, got {_shown(function)}"
        )
    if not isinstance(name := function.get("name"), str):
        raise ValueError(f"{where}.name: must be the name of a tool, got {_shown(name)}")
    return {**function, "arguments": function.get("arguments")}


def _object(where: str, arguments: Any) -> dict[str, Any]:
    """Returns a tool call's arguments as an object, {} if there are none. If the JSON text is cut
    off, returns the complete part. Raises ValueError, which names the place `where`."""
    read = arguments
    if isinstance(arguments, str):
        try:
            read = from_json(arguments.strip() or "{}", allow_inf_nan=False)
        except ValueError as error:
            if _CUT in str(error) and arguments.lstrip().startswith("{"):
                read = from_json(arguments, allow_inf_nan=False, allow_partial=True)
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise ValueError(f"{where}: must be a JSON object, got {_shown(arguments)}")
    return read


def _num_values(arguments: Any) -> int:
    """Returns an upper bound for the number of JSON values in a text, by counting separators."""
    if not isinstance(arguments, str):
        return 0
    count = sum(map(arguments.count, _SEPARATORS))
    if count > MAX_ARGUMENT_VALUES:  # some of them may be in texts
        outside = _STRING.sub("", arguments)
        count = sum(map(outside.count, _SEPARATORS))
    return count


def _shown(value: Any) -> str:
    """Returns a description of a value for an error message; short even if the value is large."""
    match value:
        case None:
            return "nothing"
        case str():
            return repr(value[:_LONGEST_SHOWN])
        case bool():
            return "true" if value else "false"
        case Mapping():
            return "an object"
    return "a list" if isinstance(value, list) else "a number"
