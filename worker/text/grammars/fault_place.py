"""Finds the place in a schema that makes llguidance refuse it. The library's message names no
place."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import reduce
from operator import getitem
from reprlib import repr as shown
from typing import Any

from promptq.worker.text.grammars.closed_schemas import children

_MAX_TRIALS = 80
_MAX_SECONDS = 1.0

Keys = tuple[Any, ...]


class _TooManyTrialsError(Exception):
    """Raised at the limit on the number or the time of trials."""


def place_of_fault(schema: dict[str, Any], reason_of: Callable[[dict[str, Any]], str]) -> Keys:
    """Returns the keys that lead to the deepest schema, or keyword, that causes the refusal.

    `reason_of` returns why llguidance refuses a schema. Each trial removes a part of the schema. If
    llguidance accepts the rest, or refuses it for another reason, the removed part has the cause.
    The number and the time of trials are limited, so in a large schema the place may be less exact.
    """
    ends_at = time.monotonic() + _MAX_SECONDS
    reason = reason_of(schema)
    trials = 0

    def persists_in(trial: dict[str, Any]) -> bool:
        nonlocal trials
        trials += 1
        if trials > _MAX_TRIALS or time.monotonic() > ends_at:
            raise _TooManyTrialsError
        return reason_of(trial) == reason

    def persists_without(places: list[Keys]) -> bool:
        trial: Any = schema
        for place in places:
            is_choice = len(place) > 1 and place[-2] in ("anyOf", "oneOf")
            trial = _with(trial, place, False if is_choice else {})  # {} would hide the others
        return persists_in(trial)

    place: Keys = ()
    try:
        while True:
            node = reduce(getitem, place, schema)
            inside = [(*place, *keys) for keys in _in_order(node)]
            if not inside or persists_without(inside):
                break
            place = _cause(inside, persists_without)
        for name in node:
            lacking = {key: value for key, value in node.items() if key != name}
            if node[name] == []:  # nothing matches such a schema
                continue
            if not persists_in(_with(schema, place, lacking)):
                return (*place, name)
    except _TooManyTrialsError:
        return place
    return place[:-1] if place and isinstance(place[-1], int) else place  # between its schemas


def path(keys: Keys) -> str:
    """Returns the keys as a path such as `.properties.tags[0]`."""
    words = (
        f"[{key}]"
        if isinstance(key, int)
        else f".{key}"
        if re.fullmatch(r"[\w$-]{1,64}", key)
        else f"[{shown(key)}]"
        for key in keys
    )
    return "".join(words)


def _cause(places: list[Keys], persists_without: Callable[[list[Keys]], bool]) -> Keys:
    removed: list[Keys] = []
    while len(places) > 1:
        half = places[: len(places) // 2]
        if persists_without([*removed, *half]):
            removed += half
            places = places[len(half) :]
        else:
            places = half
    return places[0]


def _in_order(node: dict[str, Any]) -> list[Keys]:
    """Returns the keys that lead to each child schema. Definitions come first, because they contain
    the faults of the references to them."""
    places = [keys for keys, child, _ in children(node) if isinstance(child, dict)]
    return sorted(places, key=lambda keys: keys[0] not in ("$defs", "definitions"))


def _with(schema: Any, place: Keys, value: Any) -> Any:
    if not place:
        return value
    copied = schema.copy()
    copied[place[0]] = _with(schema[place[0]], place[1:], value)
    return copied
