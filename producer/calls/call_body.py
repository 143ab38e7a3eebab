"""Reads the body and the headers of a call of an API, such as a chat.

Each API describes only the fields that a payload lacks or names differently. All other fields of a
body are fields of `promptq.shared.protocol.request.Request`, which checks them. So a new field of a
payload works over HTTP without new code, and a misspelt field is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import from_json, to_json

from promptq.producer.calls.call import CompletionCall
from promptq.producer.clients.request_builder import Prompt
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import (
    MAX_PAYLOAD_BYTES,
    MAX_SESSION_CHARS,
    PROTOCOL_VERSION,
    invalid_request,
)

MAX_CALL_BYTES = 4 * MAX_PAYLOAD_BYTES
"""The most bytes of all payloads of one call. Each answer to a call needs a complete payload."""

HEADERS = {
    "priority": "X-Priority",
    "deadline_ms": "X-Deadline-Ms",
    "detach": "X-Detach",
    "wait_for_worker": "X-Wait-For-Worker",
    "idempotency_key": "Idempotency-Key",
    "session": "X-Session-Id",
}
"""Maps a field of the body to the HTTP header that can set the field instead."""

_NUMBER_FIELDS = {"priority", "deadline_ms"}
_BOOLEAN_FIELDS = {"detach", "wait_for_worker"}
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_LONGEST_EFFORT = 100  # characters of a `reasoning_effort`

T = TypeVar("T", bound="BodyOptions")
_BOM = b"\xef\xbb\xbf"


def _known_options(options: Any) -> Any:
    """Returns `stream_options` unchanged. Raises ValueError for the first unknown name."""
    for name in options if isinstance(options, dict) else ():
        if name not in _STREAM_OPTIONS:
            raise ValueError(f"{name[:80]!r} is not one of {', '.join(_STREAM_OPTIONS)}")
    return options


_STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")
StreamOptions = Annotated[dict[str, bool], BeforeValidator(_known_options)]
IGNORED = "accepted without effect"
ONLY_VALUE = "accepted with this value only"
"""Description of a field for which promptq supports only one value."""


class BodyOptions(BaseModel):
    """The fields that all endpoints for new requests accept besides the fields of a payload."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(
        None, description="null or empty: the model of the gateway's own queue"
    )
    version: int = Field(1, ge=1, le=PROTOCOL_VERSION, description="version of the payload")
    wait_for_worker: bool = Field(True, description="false: answer 503 while no worker is alive")
    _names: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def renamed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns a body's fields under promptq's names. Raises InvalidRequestError."""
        return fields

    @classmethod
    def names_in(cls, fields: Mapping[str, Any]) -> dict[str, str]:
        """Maps names of fields in the payload to their names in the body, where the two differ."""
        return {}

    def call(self, fields: dict[str, Any], body_bytes: int, **answer: Any) -> CompletionCall:
        """Returns a call with these payload fields. `answer` sets other attributes of the call."""
        answer = {"wait_for_worker": self.wait_for_worker, "names": self._names, **answer}
        return CompletionCall(fields=fields, body_bytes=body_bytes, **answer)


class CachedOptions(BaseModel):
    """OpenAI's field `prompt_cache_key`, the same text in all calls with the same beginning."""

    prompt_cache_key: str | None = Field(
        None, description=f"sets `session`, if absent, to its first {MAX_SESSION_CHARS} characters"
    )


class GeneratingOptions(BodyOptions):
    """The additional fields of endpoints whose answers a model generates."""

    stream: bool = Field(False, description="send tokens as they come, as server-sent events")
    detach: bool = Field(
        False,
        description="continue when the client disconnects; the client can read the rest later",
    )

    def call(self, fields: dict[str, Any], body_bytes: int, **answer: Any) -> CompletionCall:
        answer = {"stream": self.stream, "detach": self.detach, **answer}
        return super().call(fields, body_bytes, **answer)


def check_effort(field: str, effort: Any) -> None:
    """Raises InvalidRequestError unless a reasoning effort is None or a short text."""
    is_short = isinstance(effort, str) and 0 < len(effort) <= _LONGEST_EFFORT
    if effort is not None and not is_short:
        raise wrong_field(field, f"must be a text of 1 to {_LONGEST_EFFORT} characters")


def with_effort(effort: str, variables: Any) -> Any:
    """Returns the variables of a chat template. Adds the reasoning effort if they have none."""
    if not isinstance(variables, dict):
        return variables  # refused later, by its name
    ours: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        ours["enable_thinking"] = False
    return {**ours, **variables}


class Body(NamedTuple):
    """A call's body: the members of its JSON object, and its size."""

    members: dict[str, Any]
    num_bytes: int


def body_of(content: bytes) -> Body:
    """Parses a call's body. Raises InvalidRequestError."""
    return Body(read_object(content), len(content))


def read_options(kind: type[T], body: Body, headers: Mapping[str, str]) -> tuple[T, dict[str, Any]]:
    """Reads a body and its headers. Returns the endpoint's options, and all other fields, which
    belong to a payload. Raises InvalidRequestError."""
    body_fields = without_none(body.members)
    for name, value in _from_headers(headers).items():
        body_fields.setdefault(name, value)
    try:
        options = kind.model_validate(kind.renamed(body_fields))
    except ValidationError as error:
        raise invalid_request(error, kind.model_fields) from None
    options._names = kind.names_in(body_fields)
    fields = dict(options.model_extra or {})
    if options.model:  # OpenAI's clients cannot leave it out, so it may be empty
        fields["model"] = options.model
    if fields.get("idempotency_key") == "":  # all callers that send it would share one answer
        raise wrong_field("idempotency_key", "is empty")
    refuse(fields, ["request_id"])
    if isinstance(options, CachedOptions) and options.prompt_cache_key:
        fields.setdefault("session", options.prompt_cache_key[:MAX_SESSION_CHARS])
    return options, fields


def check_size_of_call(
    num_bytes: int, fields: dict[str, Any], num_prompts: int, n: int = 1, named: str = "n"
) -> None:
    """Raises InvalidRequestError if a call's payloads together would exceed MAX_CALL_BYTES.
    `num_bytes` is the size of the body. `named` is the field in the error."""
    total = n * num_bytes
    if num_prompts > 1:  # each prompt has its own copy of the fields
        total += n * (num_prompts - 1) * len(to_json(fields))
    if total > MAX_CALL_BYTES:
        raise wrong_field(
            named,
            f"the payloads of {num_prompts * n} answers have {total} bytes, more than the"
            f" {MAX_CALL_BYTES} that one call may enqueue",
        )


def prompts_of(field: str, prompt: str | list[Any]) -> list[Prompt | None]:
    """Returns the list of prompts in a field: texts or token ids. Raises InvalidRequestError."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt or not all(isinstance(each, str | list) for each in prompt):
        raise wrong_field(field, "must be text, token ids, or a list of either")
    return list(prompt)


def tools_named(names: Sequence[Any], tools: Sequence[Any]) -> list[Any]:
    """Returns the tools that `tool_choice` names. Raises InvalidRequestError if one is missing."""
    known = [name_of_tool(tool) for tool in tools]
    for name in names:
        if name is None or name not in known:
            raise wrong_field(
                "tool_choice", f"allows {str(name)[:80]!r}, which is not among the tools"
            )
    return [tool for name, tool in zip(known, tools, strict=True) if name in names]


def name_of_tool(tool: Any) -> str | None:
    """Returns the name of a function tool in the form of OpenAI's chats; None for other tools."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def wrong_field(place: str, reason: str) -> InvalidRequestError:
    """Returns the error for a field. `place` is the field's name, or `NAME: PART` for a part."""
    return InvalidRequestError(f"{place}: {reason}", field=place.partition(":")[0])


def check_one_of(place: str, value: Any, known: Sequence[str], kind: str = "") -> None:
    """Raises InvalidRequestError unless `value` is one of `known`. `kind`, such as `role`, is the
    word for the value in the message."""
    if value not in known:
        shown = f"{kind} {str(value)[:80]!r}".lstrip()
        raise wrong_field(place, f"{shown} is not one of {', '.join(known)}")


def refuse(
    fields: Mapping[str, Any], names: Iterable[str], instead: Mapping[str, str] = {}
) -> None:
    """Raises InvalidRequestError if a call has one of the fields `names`. The call's endpoint does
    not support these fields. `instead` maps some of these names to the endpoint's names."""
    for name in names:
        if name in fields:
            advice = f"; use {instead[name]}" if name in instead else ""
            raise wrong_field(name, f"is not a field of this endpoint{advice}")


class HistoryNeededError(Exception):
    """The call continues an earlier response, and was read without the items of that response."""

    def __init__(self, previous_response_id: str) -> None:
        super().__init__(previous_response_id)
        self.previous_response_id = previous_response_id


def _from_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, header in HEADERS.items():
        text = headers.get(header)
        if text is None or (name == "session" and not text):
            continue
        value: Any = text
        if name in _NUMBER_FIELDS:
            value = int(text) if _NUMBER.fullmatch(text.strip()) else None
        elif name in _BOOLEAN_FIELDS:
            value = _BOOLEANS.get(text.strip().lower())
        elif name == "session":
            value = text[:MAX_SESSION_CHARS]  # a header of this name may be meant for others, too
        if value is None:
            kind = "a number" if name in _NUMBER_FIELDS else "true or false"
            raise wrong_field(header, f"{text[:80]!r} is not {kind}")
        fields[name] = value
    return fields


def read_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a body, which may begin with a byte order mark. Raises
    InvalidRequestError."""
    if not body:
        raise InvalidRequestError("the body is empty; send a JSON object")
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):
        raise InvalidRequestError(
            f"the body is not JSON: it is {encoding}, and JSON is sent in utf-8"
        )
    try:
        value = from_json(body.removeprefix(_BOM), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body is not a JSON object")
    return value


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not None: some clients send null for unset fields."""
    return {name: value for name, value in fields.items() if value is not None}
