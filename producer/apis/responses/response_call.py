"""A call of /v1/responses, and the response object that its client gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Literal
from uuid import UUID

from pydantic_core import to_json

from promptq.producer.calls.call_reader import Payload
from promptq.producer.calls.output.model_text import ExpectedOutput
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.events import Usage
from promptq.shared.queue.request_queue import new_request_id

_PREFIX = "resp_"

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """All data of a response except the output.

    `echo` has those members of the response object that repeat the call's fields, as JSON without
    braces. These members may be megabytes, so they are written once and never parsed.
    """

    id: str
    model: str
    echo: str
    background: bool = False
    store: bool = True
    detach: bool = False
    reading: dict[str, Any] = field(default_factory=dict)
    """The fields of the call's payload that `ExpectedOutput.of` needs."""
    with_logprobs: bool = False
    previous_response_id: str | None = None

    @property
    def request_ids(self) -> list[str]:
        return [self.id]

    @property
    def expected(self) -> ExpectedOutput:
        return ExpectedOutput.of(self.reading)

    @property
    def unique(self) -> str:
        """The response's id without `resp_`. The ids of the response's items contain this text."""
        return self.id.removeprefix(_PREFIX)

    @property
    def created(self) -> int:
        """Creation time in Unix seconds, from the id, so all readers see the same time."""
        return self._created_ms // 1000

    @property
    def _created_ms(self) -> int:
        return UUID(self.unique).int >> 80

    @property
    def url(self) -> str:
        """The path where the stream can be read again; '' if the response is not stored."""
        return f"/v1/responses/{self.id}?stream=true" if self.store else ""

    def object(
        self,
        status: Status,
        output: Sequence[str] = (),
        *,
        model: str = "",
        usage: Usage | None = None,
        error: dict[str, Any] | None = None,
        incomplete: str | None = None,
        took_ms: float = 0.0,
    ) -> str:
        """Returns OpenAI's response object as JSON. `output` has items as JSON. `took_ms` is the
        number of milliseconds from the response's creation to its end."""
        completed = str(int(self._created_ms + took_ms) // 1000)
        reason = f'{{"reason":{quoted(incomplete)}}}' if incomplete else "null"
        return (
            f'{{"id":{quoted(self.id)},"object":"response","created_at":{self.created}'
            f',"completed_at":{completed if status == "completed" else "null"}'
            f',"status":"{status}","background":{"true" if self.background else "false"}'
            f',"error":{to_json(error).decode()},"incomplete_details":{reason}'
            f',"model":{quoted(self.model or model)},"output":[{",".join(output)}]'
            f',"usage":{_usage(usage)},{self.echo}}}'
        )


def new_response_id() -> str:
    """Returns an id that sorts after the ids of earlier responses."""
    return _PREFIX + new_request_id().replace("-", "")


def is_response_id(text: str) -> bool:
    """Returns whether a text has the form of a response's id."""
    return re.fullmatch(_PREFIX + "[0-9a-f]{32}", text) is not None


def not_known(response_id: str) -> RequestNotFoundError:
    """Returns the error for a response that is unknown or belongs to another tenant."""
    return RequestNotFoundError(
        f"no response {response_id[:80]!r} is known; it never was stored, or it was deleted or has"
        " expired"
    )


def _usage(usage: Usage | None) -> str:
    if usage is None:
        return "null"
    return (
        f'{{"input_tokens":{usage.prompt_tokens}'
        f',"input_tokens_details":{{"cached_tokens":{usage.cached_tokens},"cache_write_tokens":0}}'
        f',"output_tokens":{usage.completion_tokens}'
        f',"output_tokens_details":{{"reasoning_tokens":{usage.reasoning_tokens or 0}}}'
        f',"total_tokens":{usage.total_tokens}}}'
    )


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A new response. `input_lines` has the input items of the call, each as a line of JSON."""

    call: ResponseCall
    input_lines: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.call.echo) + len(self.input_lines)

    def pack(self) -> tuple[dict[str, Any], list[bytes]]:
        header = {**asdict(self.call), "echo": ""}
        return header, [self.call.echo.encode(), self.input_lines]

    @classmethod
    def unpack(cls, header: dict[str, Any], parts: Sequence[Payload]) -> NewResponse:
        """Returns the response from the two values that `pack` returned."""
        echo, lines = map(bytes, parts)
        return cls(ResponseCall(**{**header, "echo": echo.decode()}), lines)
