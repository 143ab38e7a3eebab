"""Reads and writes JSON of many megabytes in small parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from promptq.shared.runtime.turns import Work

_SPACE = re.compile(r"[ \t\n\r]*")
_BEHIND_ITEM = re.compile(r"[ \t\n\r]*([,\]])[ \t\n\r]*")
_AT_ONCE = 16  # list items that are read or written between two pauses


def object_in(text: str, readers: Mapping[str, Callable[[Any], Any]]) -> Work[dict[str, Any]]:
    """Parses a JSON object. `readers` maps the name of a list to the converter of the list's items.

    Raises ValueError, RecursionError, and errors of a reader. Half of a surrogate pair raises
    ValueError, because UTF-8 cannot encode it.
    """
    decode = json.JSONDecoder(parse_constant=_refuse).raw_decode
    if "\\ud" in text or "\\uD" in text:
        decode = partial(_decode_whole, decode)
    members: dict[str, Any] = {}
    at, end = _after(text, 0, "{"), "}"
    while (at := _skip(text, at)) < len(text) and text[at] != end:
        if members:
            at = _skip(text, _after(text, at, ","))
        name, at = decode(text, at)
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not the name of a member")
        at = _skip(text, _after(text, at, ":"))
        if not text.startswith("[", at):
            members[name], at = decode(text, at)
            continue
        items: list[Any] = []
        read = readers.get(name)
        at = _skip(text, at + 1)
        is_over = text.startswith("]", at)
        while not is_over:
            item, at = decode(text, at)
            items.append(item if read is None else read(item))
            if (behind := _BEHIND_ITEM.match(text, at)) is None:
                raise ValueError(f"there is no ',' or ']' at character {at}")
            is_over = behind[1] == "]"
            at = behind.start(1) if is_over else behind.end()
            if read is not None or not len(items) % _AT_ONCE:
                yield
        members[name], at = items, at + 1
    if _skip(text, _after(text, at, end)) != len(text):
        raise ValueError("there is more than one value")
    return members


def _decode_whole(
    decode: Callable[[str, int], tuple[Any, int]], text: str, at: int
) -> tuple[Any, int]:
    value, at = decode(text, at)
    json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError
    return value, at


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def _after(text: str, at: int, wanted: str) -> int:
    at = _skip(text, at)
    if not text.startswith(wanted, at):
        raise ValueError(f"there is no {wanted!r} at character {at}")
    return at + len(wanted)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def written(value: Any) -> Work[str]:
    """Returns `value` as ASCII JSON. To free memory early, sets the items of long lists to None."""
    parts: list[str] = []
    yield from _write(value, parts.append)
    return "".join(parts)


def _write(value: Any, add: Callable[[str], object]) -> Work[None]:
    if isinstance(value, dict):
        before = "{"
        for name, member in value.items():
            add(f"{before}{quoted(name)}:")
            yield from _write(member, add)
            before = ","
        add("}" if value else "{}")
    elif isinstance(value, list) and len(value) > _AT_ONCE:
        for begin in range(0, len(value), _AT_ONCE):
            items = value[begin : begin + _AT_ONCE]
            value[begin : begin + _AT_ONCE] = [None] * len(items)
            text = json.dumps(items, separators=(",", ":"))
            add(f"{',' if begin else '['}{text[1:-1]}")
            yield
        add("]")
    elif isinstance(value, list):
        before = "["
        for member in value:
            add(before)
            yield from _write(member, add)
            before = ","
        add("]" if value else "[]")
    else:
        add(json.dumps(value))
