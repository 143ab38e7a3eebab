"""Any server with OpenAI's `/v1/completions` that takes and returns token ids.

At the start, a call with vLLM's field `return_token_ids` tests whether the server returns token
ids. Tried with vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import FinishReason
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.upstream.dialects.adapter import Adapter
from promptq.worker.upstream.dialects.dialect import (
    Chunk,
    Continuation,
    Dialect,
    Mask,
    ServerDescription,
    server_abilities,
    with_pooling,
)
from promptq.worker.upstream.dialects.transport import (
    RefusedError,
    Server,
    ServerFaultError,
    answering_as,
    check_event,
    read_json,
)

COMPLETIONS = "/v1/completions"
_MOST_BIASES = 300
"""The most entries of `logit_bias` that OpenAI's API takes."""
_MOST_BIAS = 100.0
_LEAST_LIFT = 50.0
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""Finish reasons. Any other reason, such as vLLM's `abort`, means that the server broke off."""


class OpenAIDialect(Dialect):
    """Sends only `return_token_ids` and fields of OpenAI's API, because many servers silently
    ignore other fields.

    `is_exact`: the server computes in fp32, so greedy streams resume exactly.
    """

    unheeded = frozenset(
        {
            "bad_words",
            "cache_salt",
            "ignore_eos",
            "min_p",
            "min_tokens",
            "repetition_penalty",
            "speculative_tokens",
            "top_k",
        }
    )

    def __init__(
        self, *, is_exact: bool = False, adapter: Adapter | None = None, **_: object
    ) -> None:
        self._adapter = adapter
        self.abilities = server_abilities(
            logprobs=False,
            unheeded=self.unheeded,
            lowest_temperature=0.01,  # as vLLM has it
            exact_resume=is_exact,
            inexact_with=frozenset({"temperature"}),
            most_biases=_MOST_BIASES,
            normalizes=True,
        )

    def start_command(self, settings: WorkerSettings, port: int) -> list[str]:
        raise ConfigurationError(
            f"--engine {settings.engine}: give --upstream, the URL of a running server; only vllm,"
            " sglang and llama.cpp can be started from here"
        )

    async def describe(self, server: Server) -> ServerDescription:
        with answering_as("an OpenAI server that takes token ids", server):
            (model, *_) = cards = (await server.get("/v1/models"))["data"]
            name, longest = str(model["id"]), int(model.get("max_model_len") or 0)
            if (adapter := self._adapter) is not None:
                name = adapter.name
                card = {card["id"]: card for card in cards}.get(name)
                if card is None:
                    raise ConfigurationError(f"--model: {server.url} has no LoRA adapter {name!r}")
                adapter.check_card(card, server.url)
            description = ServerDescription("an OpenAI server", name, longest or 1)
            try:
                probe = _body([0], {"max_tokens": 1, "temperature": 0.0}, name)
                (choice,) = (await server.post(COMPLETIONS, probe))["choices"]
            except RefusedError as error:
                if not error.is_servers:
                    raise
                description = await with_pooling(server, description)
        if not (description.pools or choice.get("token_ids")):
            raise ConfigurationError(
                f"--upstream: {server.url} gives no token ids (`return_token_ids`), without which"
                " no stream can survive a fault; llama.cpp gives them with --engine llama.cpp"
            )
        if not longest:
            raise ConfigurationError(
                f"--upstream: {server.url} does not say how long a context {name!r:.200} takes"
                " (`max_model_len` in /v1/models)"
            )
        return replace(description, max_model_len=longest, model_dir=model.get("root"))

    async def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
        async with server.stream(COMPLETIONS, self.body(wanted)) as events:
            async for data in events:
                if (chunk := chunk_of(event_of(data))) is not None:
                    yield chunk

    def body(self, wanted: Continuation) -> dict[str, Any]:
        """Returns the body of a call. The API has no grammars."""
        sampling = sampling_of(wanted.request, wanted.num_left)
        sampling["logit_bias"] = _bias(wanted.request.params.logit_bias, wanted.mask)
        return _body(wanted.prompt, sampling, wanted.model)


def _bias(bias: dict[str, float] | None, mask: Mask | None) -> dict[str, float]:
    """Returns biases that apply a mask: one large number is added to each allowed token's bias.

    The API takes no bias above 100 or below -100 (a sum of penalties may be larger), and only a
    limited number of biases. If a mask exceeds these limits, the function forbids tokens outside
    the mask, as many as possible, and first the tokens that the server has already chosen here.
    """
    own = {key: max(-_MOST_BIAS, min(by, _MOST_BIAS)) for key, by in (bias or {}).items()}
    if mask is None:
        return own
    allowed = [str(token_id) for token_id in mask.allowed_ids]
    lift = _MOST_BIAS - max(0.0, *(own.get(token_id, 0.0) for token_id in allowed))
    if len(allowed) <= _MOST_BIASES and lift >= _LEAST_LIFT:
        return {token_id: lift + own.get(token_id, 0.0) for token_id in allowed}
    num_bans = max(len(mask.rejected), _MOST_BIASES - len(own))
    return own | dict.fromkeys(map(str, mask.forbidden_ids[:num_bans]), -_MOST_BIAS)


def _body(prompt: list[int], sampling: dict[str, Any], model: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "return_token_ids": True, **sampling}


def sampling_of(request: EngineRequest, max_tokens: int) -> dict[str, Any]:
    """Returns the fields of a streamed call, without those that contain token ids."""
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    sampling = {name: getattr(request.params, name) for name in names}
    return {**sampling, "max_tokens": max_tokens, "seed": request.seed, "stream": True}


def event_of(data: bytes) -> dict[str, Any]:
    """Returns a parsed event of a stream. Raises ServerFaultError, OverloadedError or RefusedError
    if the event is an error."""
    event: dict[str, Any] = read_json(data)
    check_event(event)
    return event


def choice_of(event: dict[str, Any]) -> tuple[dict[str, Any], FinishReason | None]:
    """Returns an event's choice (empty if there is none), and the finish reason (None before the
    end). Raises ServerFaultError for an unknown reason."""
    if not event.get("choices"):
        return {}, None
    (choice,) = event["choices"]
    reason = choice["finish_reason"]
    if reason is not None and reason not in _REASONS:
        raise ServerFaultError(f"ended a stream with {reason!r:.40}")
    return choice, _REASONS.get(reason)


def chunk_of(event: dict[str, Any]) -> Chunk | None:
    """Returns the tokens of a stream's event; None for an event without a choice, such as the event
    with the usage. Raises ServerFaultError for an unusable event."""
    choice, reason = choice_of(event)
    if not choice:
        return None
    token_ids = choice.get("token_ids") or []
    if choice.get("text") and not token_ids:
        raise ServerFaultError("sent text without its token ids")
    return Chunk(token_ids, finish_reason=reason)
