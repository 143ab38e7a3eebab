"""vLLM's server, through the calls that take and return token ids (`--enable-scale-out`).

Tried with vLLM 0.32.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import ValidationError

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.events import TokenLogprob, TopLogprob
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.api.messages import LEAST, EngineRequest, PromptLogprobs
from promptq.worker.upstream.dialects.adapter import Adapter
from promptq.worker.upstream.dialects.dialect import (
    BANNED,
    MOST_LISTED,
    Chunk,
    Continuation,
    Dialect,
    Mask,
    ServerDescription,
    salt_of,
    server_abilities,
    with_pooling,
)
from promptq.worker.upstream.dialects.openai_completions import choice_of, event_of
from promptq.worker.upstream.dialects.transport import (
    RefusedError,
    Server,
    ServerFaultError,
    UnusableAnswerError,
    answering_as,
)
from promptq.worker.upstream.dialects.vllm_pictures import (
    GENERATE,
    picture_fields,
    takes_pictures,
)
from promptq.worker.upstream.vllm_plugin.promptq_vllm_plugin import NUM_EMITTED

_MOST_LOGPROBS = 20
"""vLLM's default of `--max-logprobs`."""
_MOST_STOPS = 64
"""The most end tokens in a call. The worker ends the stream at other end tokens. If a call has
`min_tokens` and more than 128 end tokens, including the model's, vLLM's server dies on a GPU."""
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class VllmDialect(Dialect):
    """vLLM's dialect. `is_exact`: the server computes in fp32, so greedy streams resume exactly."""

    raw_vectors: ClassVar[Mapping[str, Any]] = {"use_activation": False}

    def __init__(
        self,
        *,
        is_exact: bool = False,
        shares_prefixes: bool = False,
        adapter: Adapter | None = None,
        **_: object,
    ) -> None:
        self._shares_prefixes, self._adapter = shares_prefixes, adapter
        self.abilities = server_abilities(
            # The server's tokenising of `bad_words` misses some; drafts are the server's setting.
            unheeded=frozenset({"bad_words", "speculative_tokens"}),
            lowest_temperature=0.01,
            exact_resume=is_exact,
            inexact_with=frozenset({"temperature"}),  # its random numbers depend on the step
            most_biases=MOST_LISTED,
        )

    def start_command(self, settings: WorkerSettings, port: int) -> list[str]:
        adapter = self._adapter
        command = [
            *(settings.engine_command or "vllm", "serve"),
            str(adapter.base if adapter else settings.model),
            *("--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"),
            *("--dtype", settings.dtype, "--max-num-seqs", str(settings.max_num_seqs)),
            *("--structured-outputs-config", '{"backend": "guidance"}'),
        ]
        if settings.max_model_len is not None:
            command += ["--max-model-len", str(settings.max_model_len)]
        if adapter is not None:
            module = json.dumps({"name": adapter.name, "path": str(adapter.folder)})
            command += ["--enable-lora", "--lora-modules", module]
        return [*command, *settings.engine_arguments]

    async def describe(self, server: Server) -> ServerDescription:
        with answering_as("vLLM's server", server):
            version = (await server.get("/version"))["version"]
            (model, *_) = cards = (await server.get("/v1/models"))["data"]
            metrics = str(await server.get("/metrics"))
            match = _CACHE_CONFIG.search(metrics)
            cache = dict(_LABEL.findall(match[1] if match else ""))
            description = ServerDescription(
                software=f"vLLM {version!s:.80}",
                model=self._adapter.name if self._adapter else model["id"],
                max_model_len=int(model["max_model_len"]),
                kv_tokens=_number(cache.get("kv_cache_size_tokens")) or None,
                block_size=_number(cache.get("block_size")) or 1,
                model_dir=model.get("root"),
            )
        if self._adapter is not None:
            await self._load(server, self._adapter, cards)
        return await self._try(server, description)

    async def _load(self, server: Server, adapter: Adapter, cards: list[dict[str, Any]]) -> None:
        """Load an adapter into the server, unless its `cards` have it. Raises ConfigurationError.

        vLLM would also load an adapter with the base model's name, and answer with the adapter.
        """
        card = {card["id"]: card for card in cards}.get(adapter.name)
        if card is None:
            body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
            try:
                await server.post("/v1/load_lora_adapter", body, server.idle_seconds)
            except RefusedError as error:
                cards = (await server.get("/v1/models"))["data"]
                if adapter.name not in [card["id"] for card in cards]:  # by another worker
                    raise ConfigurationError(
                        f"--model: vLLM at {server.url} does not load the adapter"
                        f" {adapter.name!r} ({error}); start it with --enable-lora, and with"
                        f" --lora-modules {adapter.name}={adapter.folder} or"
                        " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                    ) from error
        else:
            adapter.check_card(card, f"vLLM at {server.url}")

    async def _try(self, server: Server, description: ServerDescription) -> ServerDescription:
        """Generate one token. This also shows that the engine behind the server lives. A server for
        pooling computes a vector instead."""
        body = {
            "model": description.model,
            "token_ids": [0],
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "detokenize": False},
        }
        try:
            answer = await server.post(GENERATE, body)
        except RefusedError as error:
            if error.status not in (403, 404):
                raise
            try:
                return await with_pooling(server, description)
            except RefusedError:
                raise ConfigurationError(
                    f"--upstream: vLLM at {server.url} takes no token ids; start it with"
                    " --enable-scale-out (0.32 or newer)"
                ) from error
        if not answer["choices"][0]["token_ids"]:
            raise ServerFaultError("generated nothing when it was tried")
        return replace(description, takes_pictures=await takes_pictures(server, body))

    def salt(self, request: EngineRequest) -> dict[str, str]:
        return salt_of(request, shares_prefixes=self._shares_prefixes)

    async def tokenize(self, server: Server, text: str) -> list[int] | None:
        body = {"prompt": text, "add_special_tokens": False}
        try:
            tokens: list[int] = (await server.post("/tokenize", body))["tokens"]
        except RefusedError:
            return None  # started without a tokenizer
        return tokens

    async def prompt_logprobs(
        self, server: Server, request: EngineRequest, model: str
    ) -> PromptLogprobs | None:
        """Returns log-probabilities of the prompt's tokens, from a call without a stream, because
        streams do not report them. The server keeps the prompt's KV cache for the stream."""
        body = self._body(Continuation(request, (), model)) | {"stream": False}
        num_top = request.params.prompt_logprobs or 0
        body["sampling_params"] |= {
            "max_tokens": 1,
            "min_tokens": 0,
            "logprobs": None,
            "prompt_logprobs": num_top,
        }
        answer = await server.post(GENERATE, body, server.idle_seconds)
        if (entries := answer.get("prompt_logprobs")) is None:
            return None
        return _of_prompt(request.prompt_token_ids, entries, num_top)

    async def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
        body, num_emitted = self._body(wanted), len(wanted.emitted)
        if wanted.mask is not None:
            _put_mask(body["sampling_params"], wanted.mask)
        if wanted.grammar is not None:
            body["sampling_params"] |= {
                "structured_outputs": {"grammar": wanted.grammar},
                "extra_args": {NUM_EMITTED: num_emitted},
            }
        async with server.stream(GENERATE, body) as events:
            async for data in events:
                if (chunk := _read(data, wanted.request.params.logprobs or 0)) is not None:
                    if chunk.num_prompt_tokens is not None:
                        chunk.num_prompt_tokens -= num_emitted
                    yield chunk

    def _body(self, wanted: Continuation) -> dict[str, Any]:
        request, params, num_emitted = wanted.request, wanted.request.params, len(wanted.emitted)
        sampling = {
            "max_tokens": wanted.num_left,
            # `min_tokens` forbids the model's end token, even in a request that ignores this token.
            "min_tokens": max(0, params.min_tokens - num_emitted) if request.end_token_ids else 0,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(0, params.top_k),
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "logit_bias": params.logit_bias,
            "seed": request.seed,
            # The model's end tokens are among these, if the request heeds them.
            "stop_token_ids": sorted(request.end_token_ids)[:_MOST_STOPS],
            "ignore_eos": True,
            # One more, as the chosen token may be another one than the likeliest.
            "logprobs": params.logprobs and min(params.logprobs + 1, _MOST_LOGPROBS),
            "detokenize": False,
        }
        return {
            "model": wanted.model,
            "token_ids": wanted.prompt,
            "sampling_params": sampling,
            "reasoning_ended": True,  # else a grammar might wait for the end of a thought
            "stream": True,
            **(salt := self.salt(request)),
            **picture_fields(request, salt),
        }


def _put_mask(sampling: dict[str, Any], mask: Mask) -> None:
    sampling["min_tokens"] = 0
    biases = sampling["logit_bias"]
    if np.count_nonzero(mask.allowed) <= MOST_LISTED:
        sampling["allowed_token_ids"] = mask.allowed_ids
    elif mask.is_grammar_beside(biases):
        sampling["structured_outputs"] = {"grammar": mask.grammar}
    else:
        own = sorted(mask.allowed_of(biases).items(), key=lambda item: -abs(item[1]))
        num_bans = max(len(mask.rejected), MOST_LISTED - len(own))
        bans = dict.fromkeys(map(str, mask.forbidden_ids[:num_bans]), BANNED)
        sampling["logit_bias"] = dict(own[: MOST_LISTED - len(bans)]) | bans


def _read(data: bytes, num_top: int) -> Chunk | None:
    event = event_of(data)
    choice, reason = choice_of(event)
    if not choice:
        return None
    logprobs = choice.get("logprobs")
    return Chunk(
        token_ids=choice["token_ids"] or [],
        logprobs=[_logprob(entry, num_top) for entry in logprobs["content"]] if logprobs else None,
        finish_reason=reason,
        num_prompt_tokens=(event.get("usage") or {}).get("prompt_tokens"),
    )


def _logprob(item: dict[str, Any], num_top: int) -> TokenLogprob:
    """Returns log-probabilities of the chosen and the `num_top` likeliest tokens. Raises
    UnusableAnswerError for a value that is no log-probability, such as a NaN."""
    ranked = sorted(item["top_logprobs"], key=lambda token: token["rank"])
    try:
        top = [
            TopLogprob(token_id=token["token_id"], logprob=_floored(token["logprob"]))
            for token in ranked[:num_top]  # tokens of equal log-probability have one rank
            if token["rank"] <= num_top
        ]
        return TokenLogprob(
            token_id=item["token_id"],
            logprob=_floored(item["logprob"]),
            rank=item["rank"],
            top=top or None,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UnusableAnswerError(
            f"{first['loc'][0]} {first['input']!r:.40} in its log-probabilities: {first['msg']}"
        ) from None


def _of_prompt(
    token_ids: Sequence[int], entries: list[dict[str, Any]], num_top: int
) -> PromptLogprobs:
    """Returns vLLM's log-probabilities of a prompt: for each token from the second on, those of the
    token itself and of the `num_top` likeliest tokens."""
    own, likeliest = [], []
    for token_id, entry in zip(token_ids[1:], entries[1:], strict=True):
        own.append(entry[str(token_id)])
        ranked = sorted(entry.items(), key=lambda item: item[1]["rank"])
        likeliest.append([(int(name), token["logprob"]) for name, token in ranked[:num_top]])
    shape = (len(own), num_top)
    return PromptLogprobs(
        np.array([token["logprob"] for token in own], np.float32),
        np.array([token["rank"] for token in own], np.int64),
        np.array([[name for name, _ in row] for row in likeliest], np.int64).reshape(shape),
        np.array([[by for _, by in row] for row in likeliest], np.float32).reshape(shape),
    )


def _floored(logprob: Any) -> Any:
    """Returns LEAST for minus infinity, as vLLM's own API does."""
    return LEAST if logprob == -math.inf else logprob


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
