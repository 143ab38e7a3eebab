"""Error messages for output formats that llguidance refuses.

The library's message does not name a fault's place in a schema, so this module finds the place.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import reduce
from operator import getitem
from reprlib import repr as shown
from typing import Any

from promptq.shared.protocol.output_format import (
    IF_NOT_STRICT,
    ChoiceOutput,
    GrammarOutput,
    JsonOutput,
    Output,
    RegexOutput,
    ToolCallOutput,
)
from promptq.worker.text.grammars.closed_schemas import children
from promptq.worker.text.grammars.llguidance_calls import schema_grammar

_NOT_ENFORCED = f"cannot be enforced; leave it out{IF_NOT_STRICT}"
_MAX_TRIALS = 80
_MAX_SECONDS = 1.0

Keys = tuple[Any, ...]


def placed_schemas(wanted: Output) -> list[tuple[str, dict[str, Any], bool]]:
    """Returns (path in the request, schema, is_strict) for each schema in an output format."""
    if isinstance(wanted, JsonOutput):
        return [(f"{wanted.field}.json_schema.schema", wanted.schema, wanted.strict)]
    if isinstance(wanted, ToolCallOutput):
        return [(tool.place, tool.parameters, tool.strict) for tool in wanted.tools]
    return []


def refusal_message(wanted: Output, reason: str, reason_against: Callable[[str], str]) -> str:
    """Returns the error message for an output format that llguidance refuses for this reason.

    For a schema, the message names the place of the fault. `reason_against` returns the reason why
    llguidance refuses the text of a grammar; empty if llguidance accepts it.
    """
    if isinstance(wanted, GrammarOutput):
        if listed := re.match(r"(?:at )?(\d+)\(\d+\): (.*?)(?: \(at .*\))?$", reason):
            reason = f"line {listed[1]}: {_reworded(listed[2])}"
        elif reason.startswith("NoExtension"):
            reason = "no text matches it"
        return f"{wanted.field}: the grammar is refused: {reason}"
    if isinstance(wanted, RegexOutput | ChoiceOutput):
        kind = "regex" if isinstance(wanted, RegexOutput) else "choice"
        return f"{wanted.field}: the {kind} is refused: {reason}"
    for place, schema, strict in placed_schemas(wanted):

        def reason_of_schema(schema: dict[str, Any], strict: bool = strict) -> str:
            try:
                return reason_against(schema_grammar(schema, strict))
            except ValueError as error:
                return str(error)

        if fault := reason_of_schema(schema):
            place += _path(_place_of_fault(schema, reason_of_schema))
            return f"{place}: {_reworded(fault)}"
    return f"{wanted.field}: the schema is refused: {_reworded(reason)}"


def _reworded(reason: str) -> str:
    reason = reason.split("failed to compile JSON schema: ")[-1]
    if match := re.fullmatch(r"Unimplemented keys: \[(.*)\]", reason):
        return f"{match[1].replace(chr(34), '')} {_NOT_ENFORCED}"
    if match := re.fullmatch(r"Unknown format: ?(.*)", reason):
        return f"the format {shown(match[1])} {_NOT_ENFORCED}"
    if reason.startswith("oneOf constraints are not supported"):
        return "one value may match two of these schemas; use anyOf, or let them exclude each other"
    if reason.startswith("regex parse error") and "look-around" in reason:
        return "a pattern that looks ahead or behind cannot be enforced; write it without (?...)"
    if reason.startswith(("NoExtension", "no text matches")):
        return "no value matches it"
    if reason.startswith("Unsatisfiable schema: "):
        return reason.replace("Unsatisfiable schema", "no value matches it", 1)
    if reason.startswith(("lexer error: too many", "Parser Error: ")):
        return "it is too complex"
    if reason.startswith("Resource "):
        return "this refers to another document; only references inside the schema are followed"
    return reason


class _TooManyTrialsError(Exception):
    """Raised at the limit on the number or the time of trials."""


def _place_of_fault(schema: dict[str, Any], reason_of: Callable[[dict[str, Any]], str]) -> Keys:
    """Returns the keys that lead to the deepest schema, or keyword, that llguidance refuses. Each
    trial removes a part of the schema: if `reason_of` then returns another reason, the fault is in
    that part. Trials have limits, so in a large schema the place may be less exact."""
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


def _path(keys: Keys) -> str:
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
    """Returns the keys that lead to each child schema. Definitions come first: if a definition has
    a fault, each reference to the definition fails too."""
    places = [keys for keys, child, _ in children(node) if isinstance(child, dict)]
    return sorted(places, key=lambda keys: keys[0] not in ("$defs", "definitions"))


def _with(schema: Any, place: Keys, value: Any) -> Any:
    if not place:
        return value
    copied = schema.copy()
    copied[place[0]] = _with(schema[place[0]], place[1:], value)
    return copied
