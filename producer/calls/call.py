"""A parsed call of an API: the fields of its payloads, and the options for its answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from promptq.producer.calls.output.model_text import needed_of
from promptq.producer.clients.request_builder import Prompt
from promptq.shared.protocol.urgency import priority_of

MAX_CHOICES = 256
"""The most answers to one call: the number of its prompts times `n`."""


class Extra(Protocol):
    """Data that a call's answer needs and the call's payloads do not contain."""

    @property
    def num_bytes(self) -> int: ...
    def pack(self) -> tuple[dict[str, Any], list[bytes]]:
        """Returns the data as a small JSON object and binary parts of any size."""


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One call of an API. All its payloads share `fields`. `prompts` is `[None]` for a chat.

    A call of /v1/responses or /v1/messages is a chat whose answer has that API's `form`. In the
    forms `count` and `input_count`, the answer is the number of the chat's tokens.
    """

    fields: dict[str, Any]
    is_chat: bool = True
    prompts: list[Prompt | None] = field(default_factory=lambda: [None])
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    echo_only: bool = False
    """Whether the answer has only the prompt (`max_tokens: 0`). The engine still generates one
    token, which the answer leaves out."""
    shows_prompt_logprobs: bool = False
    detach: bool = False
    wait_for_worker: bool = True
    body_bytes: int = 0
    encoding_format: Literal["float", "base64"] | None = None
    """The encoding of vectors; None if the call requests text."""
    top_n: int | None = None
    """The most documents in the answer of /v1/rerank; None: all."""
    form: Literal[
        "", "embeddings", "rerank", "score", "response", "message", "count", "input_count"
    ] = ""
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps names of fields in a payload to their names in the body; see `in_api_names`."""
    has_pictures: bool = False
    extra: Extra | None = None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def model(self) -> str | None:
        model: str | None = self.fields.get("model")
        return model

    @property
    def priority(self) -> int:
        """The field `priority`, or else the priority of the field `service_tier`; by default 0."""
        priority, tier = self.fields.get("priority"), self.fields.get("service_tier")
        if isinstance(priority, int):
            return priority
        return priority_of(tier) if isinstance(tier, str) else 0

    def requests(self, completion_id: str) -> list[dict[str, Any]]:
        """Returns the fields of each request, from which `compose` (clients/request_builder.py)
        builds a payload. The `n` requests of a prompt follow each other."""
        seed, key = self.fields.get("seed"), self.fields.get("idempotency_key")
        requests = []
        for index, request_id in enumerate(request_ids(completion_id, self.num_choices)):
            own: dict[str, Any] = {"request_id": request_id}
            if (prompt := self.prompts[index // self.n]) is not None:
                own["prompt"] = prompt
            if type(seed) is int and self.n > 1:  # other types are refused later
                own["seed"] = seed + index % self.n
            if key is not None and self.num_choices > 1:
                own["idempotency_key"] = f"{key}:{index}"
            requests.append({**self.fields, **own})
        return requests

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of all payloads of the call, from the size of the call's body."""
        return self.body_bytes * self.num_choices

    def for_answer(self) -> CompletionCall:
        """Returns the call without the data that only the payloads need. This data may be
        megabytes."""
        of_form = ("output_prefix",) if self.form == "message" else ()
        needed = ("model", "logprobs", "priority", "service_tier", *of_form)
        kept: dict[str, Any] = {name: self.fields[name] for name in needed if name in self.fields}
        kept |= needed_of(self.fields)
        prompts: list[Prompt | None] = [None] * len(self.prompts)
        if self.echo:
            prompts = [prompt if isinstance(prompt, str) else None for prompt in self.prompts]
        return replace(self, fields=kept, prompts=prompts, extra=None)

    def with_fields(self, **fields: Any) -> CompletionCall:
        """Returns the call with these fields set in all its payloads."""
        return replace(self, fields={**self.fields, **fields})

    def with_model_of(self, aliases: Mapping[str, str]) -> CompletionCall:
        """Returns the call with the model's name, if the call names a model by one of `aliases`."""
        name = aliases.get(self.model) if isinstance(self.model, str) else None
        return self if name is None else self.with_fields(model=name)

    def with_key_of(self, caller: str, tenant: str) -> CompletionCall:
        """Returns the call with an idempotency key that is valid only for this tenant ('' for
        none), this caller and this form of answer.

        The tenant is part of the key: another tenant's API key may later have the caller's name.
        """
        key = self.fields.get("idempotency_key")
        if not isinstance(key, str):
            return self
        kind = self.form or self.is_chat
        own = f"{tenant}\n{caller}\n{kind} {len(self.prompts)} {self.n}\n{key}"
        hashed = hashlib.sha256(own.encode("utf-8", "surrogatepass")).hexdigest()
        return self.with_fields(idempotency_key=hashed)


def request_ids(completion_id: str, num_choices: int) -> list[str]:
    """Returns the ids of the requests of a completion, one for each choice."""
    if num_choices == 1:
        return [completion_id]
    return [f"{completion_id}:{index}" for index in range(num_choices)]
