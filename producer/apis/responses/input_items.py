"""Converts the input of a response, a list of items, to the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from promptq.producer.calls.call_body import check_one_of, wrong_field
from promptq.shared.protocol.pictures import content_of, picture_part

MAX_ITEMS = 16_384
"""The most items in the input of one response."""

_PICTURE = "input_image"
_ROLES = ("user", "assistant", "system", "developer")
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}  # of the ids, for each supported type


def read_items(text_or_items: str | Sequence[Any], unique: str) -> list[dict[str, Any]]:
    """Returns an `input` as a list of full items, which have ids and default values for missing
    members. The ids contain `unique`.

    The id is the first member of each item, so that `id_of` need not read the rest. Raises
    InvalidRequestError for an item that is no message, function call, function output or reasoning.
    """
    if isinstance(text_or_items, str):
        text_or_items = [{"role": "user", "content": text_or_items}]
    if not text_or_items:
        raise wrong_field("input", "is empty, and there is nothing to answer")
    if (count := len(text_or_items)) > MAX_ITEMS:
        raise wrong_field("input", f"{count} items are more than the {MAX_ITEMS} allowed")
    items = []
    for index, item in enumerate(text_or_items):
        checked = _checked(f"input: item {index}", item)
        item_id = f"{_PREFIXES[checked['type']]}_{unique}_in{index}"
        items.append({"id": item_id, **checked} | {"id": item_id})
    return items


def id_of(line: bytes) -> bytes:
    """Returns the id in the JSON of an item that `read_items` returned."""
    return line.split(b'"', 4)[3]


def messages_of(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns items as the messages of a chat. Adds reasoning to the assistant's next message, and
    a function call to the assistant's previous message."""
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for item in items:
        match item["type"]:
            case "reasoning":
                reasoning += _text_of_parts(item.get("content") or ())
                continue
            case "function_call_output":
                content = _content_of(item["output"])
                messages.append(
                    {"role": "tool", "tool_call_id": item["call_id"], "content": content}
                )
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant" or reasoning:
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case _:
                role = "system" if item["role"] == "developer" else item["role"]
                messages.append({"role": role, "content": _content_of(item["content"])})
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return messages


def _checked(place: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise wrong_field(place, "is not an object")
    kind = item.get("type") or ("message" if "role" in item else None)
    match kind:
        case "message":
            role = item.get("role")
            check_one_of(place, role, _ROLES, "role")
            part = "output_text" if role == "assistant" else "input_text"
            content = _parts(place, "content", item.get("content"), part)
            return {"status": "completed", **item, "type": kind, "content": content}
        case "function_call":
            if item.get("arguments") is None:
                item = {**item, "arguments": "{}"}
            for name in ("call_id", "name", "arguments"):
                if not isinstance(item.get(name), str):
                    raise wrong_field(place, f"a function_call needs {name}, a text")
            if item.get("status") != "incomplete" and not _is_object(item["arguments"]):
                shown = repr(item["arguments"][:80])
                raise wrong_field(place, f"arguments must be a JSON object, as text, got {shown}")
            return {"status": "completed", **item, "type": kind}
        case "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise wrong_field(place, "a function_call_output needs call_id, a text")
            output = item.get("output")
            if not isinstance(output, str):
                output = _parts(place, "output", output, "input_text")
            return {"status": "completed", **item, "type": kind, "output": output}
        case "reasoning":
            texts = item.get("content")
            if texts is not None:
                texts = _parts(place, "content", texts, "reasoning_text")
            return {"summary": [], **item, "type": kind, "content": texts}
    known = ", ".join(_PREFIXES)
    raise wrong_field(place, f"type {str(kind)[:80]!r} is not served; served are {known}")


def _parts(place: str, name: str, content: Any, default: str) -> list[dict[str, Any]]:
    """Returns an item's content as a list of parts. A text becomes one part of the type `default`.
    Raises InvalidRequestError."""
    if isinstance(content, str):
        content = [{"type": default, "text": content}]
    if not isinstance(content, list):
        raise wrong_field(place, f"{name} must be text or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else part
        is_served = isinstance(part, Mapping) and isinstance(_text_of(part), str)
        if kind == _PICTURE and default == "input_text":
            is_served = isinstance(_url_of(part), str)
        if not is_served:
            others = (
                f" and {_PICTURE} with image_url or file_id are"
                if default == "input_text"
                else " is"
            )
            raise wrong_field(
                place, f"a part of type {str(kind)[:80]!r} is not served, only text{others}"
            )
    return content


def _text_of(part: Mapping[str, Any]) -> Any:
    return part.get("refusal" if part.get("type") == "refusal" else "text")


def _content_of(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return content_of(
        picture_part(_url_of(part))
        if part.get("type") == _PICTURE
        else {"type": "text", "text": _text_of(part)}
        for part in content
    )


def _url_of(part: Mapping[str, Any]) -> Any:
    return part.get("image_url") or part.get("file_id")


def _text_of_parts(content: str | Iterable[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(map(_text_of, content))


def _is_object(text: str) -> bool:
    try:
        read = from_json(text.strip() or "{}", allow_inf_nan=False)
    except ValueError:
        return False
    return read is None or isinstance(read, dict)
