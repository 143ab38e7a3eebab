"""Reads a call that forks a stream, and makes of it the call that the source's endpoint takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from promptq.producer.clients.forks import ForkSource, check_changes
from promptq.producer.gateway.context.access import Caller
from promptq.producer.gateway.http.bodies import read_json
from promptq.producer.gateway.openai.request_bodies import HEADERS
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import ForkPoint, invalid_request

MOST_BYTES = 65_536
"""A body of this size is read in milliseconds at worst."""


class ForkOptions(BaseModel):
    """The body of a fork. All other fields are those of the source's endpoint, to be changed."""

    model_config = ConfigDict(extra="allow", strict=True)

    at: int | None = Field(
        None, ge=0, description="go on behind so many tokens; left out: behind all there are so far"
    )
    append: str = Field("", description="add this text behind them")
    choice: int | None = Field(
        None, ge=0, description="of a call with several answers, the index of one"
    )

    @property
    def changes(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    def request_id(self, completion_id: str) -> str:
        """The id in the queue of what is forked."""
        return completion_id if self.choice is None else f"{completion_id}:{self.choice}"


@dataclass(frozen=True, slots=True)
class ForkCall:
    """A call of /v1/chat/completions or /v1/completions that makes a fork."""

    is_chat: bool
    body: bytes
    point: ForkPoint


def read_fork(body: bytes) -> ForkOptions:
    """Raises InvalidRequestError naming the field that is wrong."""
    try:
        given = read_json(body or b"{}")
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None
    if not isinstance(given, dict):
        raise InvalidRequestError("the body is not a JSON object")
    # As for other calls: some clients send null for fields that they leave out.
    given = {name: value for name, value in given.items() if value is not None}
    try:
        options = ForkOptions.model_validate(given)
    except ValidationError as error:
        raise invalid_request(error) from None
    check_changes(options.changes)
    return options


def fork_call(
    source: ForkSource,
    options: ForkOptions,
    headers: Mapping[str, str],
    caller: Caller,
    model: str,
) -> ForkCall:
    """The call that has the source's fields, but for what the options and headers change.

    `model` is that of the source's queue. Raises InvalidRequestError.
    """
    fields, point = source.fork(options.at, options.append)
    is_chat = fields.get("messages") is not None
    if model:
        fields.setdefault("model", model)
    tenant = source.tenant or fields.pop("tenant", None)
    if tenant and (tenant == caller.tenant or caller.is_free):
        fields["tenant"] = tenant
    else:
        fields.pop("tenant", None)  # an administrator may read it, and forks it as themselves
    for name in (name for name, header in HEADERS.items() if header in headers):
        fields.pop(name, None)
    num_top = fields.get("logprobs")
    if is_chat and num_top is not None:  # the payload's one field is two of a chat's body
        fields["logprobs"] = True
        if "logprobs" not in options.changes:
            fields["top_logprobs"] = num_top
    return ForkCall(is_chat, to_json({**fields, **options.changes}), point)
