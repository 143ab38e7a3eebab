"""Forks: requests that continue another request, the source, after some of the source's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from promptq.producer.clients.request_builder import compose
from promptq.shared.errors import InvalidRequestError, RequestNotFoundError
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.pictures import MAX_PICTURES, put_back
from promptq.shared.protocol.request import ForkPoint, NewRequest
from promptq.shared.queue import lookups
from promptq.shared.queue.call import PAUSE, Call, Operation, text_of
from promptq.shared.runtime.large_json import object_in
from promptq.shared.runtime.turns import Work, sliced

_NOT_COPIED = frozenset(
    {"seed", "idempotency_key", "trace_context", "prompt_logprobs", "output_prefix"}
)
"""Fields that a fork does not copy. The source's seed would sample the same tokens again."""

FIXED = ("prompt", "messages", "tools", "chat_template_kwargs", "model", "output_prefix")
"""Fields that a fork cannot change, because the copied tokens belong to the source's prompt."""


_SKIPPED = dict.fromkeys(("logprobs", "prompt_logprobs", "prompt_texts"), lambda item: None)


class _Output(BaseModel):
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ForkSource:
    """The source of a fork: a request's payload as it was enqueued, and its tokens so far."""

    request_id: str
    fields: dict[str, Any]
    tenant: str
    token_ids: list[int]

    def fork(self, at: int | None, append: str) -> tuple[dict[str, Any], ForkPoint]:
        """Returns a fork's payload fields and its fork point. The fork continues after `at` tokens
        and the text `append`. Raises InvalidRequestError that names the wrong argument."""
        if not isinstance(append, str):
            raise InvalidRequestError("append: must be text", field="append")
        point = ForkPoint(self.request_id, self._position(at))
        prefix: dict[str, Any] = {"token_ids": self.token_ids[: point.position]}
        own_prefix = self.fields.get("output_prefix")
        if at is None and not self.token_ids and isinstance(own_prefix, dict):
            prefix |= own_prefix  # the source has no output yet, and will begin with this
        if append:
            prefix["text"] = f"{prefix.get('text', '')}{append}"
        kept = {name: value for name, value in self.fields.items() if name not in _NOT_COPIED}
        if prefix != {"token_ids": []}:
            kept["output_prefix"] = prefix
        return kept, point

    def compose_fork(self, at: int | None, append: str, changes: Mapping[str, Any]) -> NewRequest:
        """Returns a fork that continues after `at` tokens and the text `append`, with the fields in
        `changes`. Raises InvalidRequestError."""
        fields, point = self.fork(at, append)
        if self.tenant:
            fields["tenant"] = self.tenant
        [new] = compose([{**fields, **changes}])
        return replace(new, forked_from=point)

    def _position(self, at: int | None) -> int:
        has = len(self.token_ids)
        if at is None:
            return has
        if type(at) is not int or not 0 <= at <= has:
            raise InvalidRequestError(
                f"at: the request {self.request_id!r} has {has} tokens so far, so it can be forked"
                f" at 0 to {has}, not at {at!r:.40}",
                field="at",
            )
        return at


def check_changes(changes: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError if a fork cannot change one of these fields, such as `prompt`."""
    for name in FIXED:
        if name in changes:
            raise InvalidRequestError(
                f"{name}: cannot be changed, because a fork continues tokens of the same prompt",
                field=name,
            )


def fork_source(keys: Keys, request_id: str) -> Operation[ForkSource]:
    """Reads the request that a fork continues. Raises RequestNotFoundError for an unknown request,
    InvalidRequestError for a spoilt payload."""
    fields_read = ["HMGET", keys.request(request_id), "payload", "tenant", "result", "pictures"]
    # Read the log first: when the log is folded, the result is written before the log is deleted.
    events, (payload, tenant, result, names) = yield [
        lookups.log_after(keys, request_id, 0),
        Call("", fields_read, list, lambda: [None] * 4),
    ]
    if payload is None:
        raise RequestNotFoundError.of(request_id, keys.queue)
    try:
        fields = yield from sliced(object_in(payload.decode(), {}), PAUSE)
        token_ids = yield from sliced(_token_ids_in(events or [result or b""]), PAUSE)
    except (ValueError, RecursionError):
        raise InvalidRequestError(
            f"payload: the payload or the log of the request {request_id!r} is not JSON in the form"
            " of the protocol, so the request cannot be forked",
            field="payload",
        ) from None
    if names:
        stored = yield from lookups.pictures(keys, text_of(names).split()[:MAX_PICTURES])
        fields["messages"] = put_back(fields.get("messages"), stored)
    return ForkSource(request_id, fields, (tenant or b"").decode("utf-8", "replace"), token_ids)


def _token_ids_in(outputs: list[bytes]) -> Work[list[int]]:
    token_ids: list[int] = []
    for output in filter(None, outputs):
        fields = yield from object_in(output.decode(), _SKIPPED)
        token_ids += _Output.model_validate(fields).token_ids
        yield
    return token_ids
