"""llama.cpp's server through `/completion`, which takes and returns token ids.

Tried with the commit 0c1e570.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import FinishReason
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.checkpoints.location import check_source, is_gguf
from promptq.worker.text.grammars.gbnf import gbnf_of
from promptq.worker.upstream.dialects.adapter import Adapter
from promptq.worker.upstream.dialects.dialect import (
    Chunk,
    Continuation,
    Dialect,
    ServerDescription,
    server_abilities,
    with_pooling,
)
from promptq.worker.upstream.dialects.transport import (
    AnsweredFaultError,
    RefusedError,
    Server,
    ServerFaultError,
    answering_as,
    message_of,
    read_json,
)

_COMPLETION = "/completion"
_TOKENS_AT_ONCE = 8
"""Number of tokens that one call requests where a stream has left tokens out."""
_REASONS = {"eos": FinishReason.STOP, "limit": FinishReason.LENGTH}
_END_TOKEN = re.compile(rb"_?[<\[].+[>\[\]]", re.DOTALL)
"""Matches the texts by which llama.cpp recognises end tokens."""
_TOO_LARGE = "too large to process"
"""A part of the server's message for a prompt with more tokens than --ubatch-size. The server must
compute a prompt in one step if the vector is, for example, the mean over all tokens."""
_RANDOM_SEED = 2**32 - 1
"""For this seed, the server draws a random seed."""


class LlamaCppDialect(Dialect):
    """llama.cpp's dialect. `is_exact`: weights and KV cache are fp32, so greedy streams resume
    exactly.

    A slot reuses the longest prefix that a prompt shares with an earlier prompt of any tenant.
    """

    raw_vectors: ClassVar[Mapping[str, Any]] = {"embd_normalize": -1}

    def __init__(
        self, *, is_exact: bool = False, adapter: Adapter | None = None, **_: object
    ) -> None:
        self._adapter = adapter
        self.abilities = server_abilities(
            logprobs=False,  # it reports no ranks
            unheeded=frozenset(
                {
                    "bad_words",
                    "cache_salt",
                    "frequency_penalty",  # these two would count the prompt too
                    "presence_penalty",
                    "min_tokens",
                    "speculative_tokens",
                }
            ),
            exact_resume=is_exact,
            inexact_with=frozenset({"temperature"}),  # the random numbers begin anew
        )

    def start_command(self, settings: WorkerSettings, port: int) -> list[str]:
        names_file = {"-m", "--model"}.intersection(settings.engine_arguments)
        if not (names_file or is_gguf(settings.model or "")):
            raise ConfigurationError(
                "--engine llama.cpp: give a GGUF file as --model; or name it behind `--`, as in"
                " `-- --model model.gguf`, and give the directory with the model's tokenizer as"
                " --model"
            )
        slots = settings.max_num_seqs
        command = [
            *(settings.engine_command or "llama-server", "--host", "127.0.0.1"),
            *("--port", str(port), "--parallel", str(slots), "--threads-http", str(slots + 8)),
        ]
        if settings.max_model_len is not None:
            command += ["--ctx-size", str(slots * settings.max_model_len)]
        if not names_file:
            command += ["--model", check_source(str(settings.model))]
        return [*command, *settings.engine_arguments]

    async def describe(self, server: Server) -> ServerDescription:
        with answering_as("llama.cpp's server", server):
            props = await server.get("/props")
            slots = int(props["total_slots"])
            length = int(props["default_generation_settings"]["n_ctx"])
            description = ServerDescription(
                software=f"llama.cpp {props['build_info']!s:.80}"
                f" ({props.get('model_ftype', '?')!s:.80})",
                model=self._adapter.name
                if self._adapter
                else props.get("model_alias") or props["model_path"],
                max_model_len=length,
                max_num_seqs=slots,
                kv_tokens=slots * length,
            )
        try:
            lora = await self._lora_fields(server)
        except RefusedError as error:
            raise ConfigurationError(f"--model: llama.cpp at {server.url} {error}") from error
        try:
            return await with_pooling(server, description, may_do_both=False)
        except RefusedError as error:
            if error.status != 501:  # the status without --embeddings
                raise
        probe = {"prompt": [0], "n_predict": 1, "temperature": 0.0, "return_tokens": True}
        answer = await server.post(_COMPLETION, probe | lora)
        if not answer.get("tokens"):
            raise ConfigurationError(
                f"--upstream: llama.cpp at {server.url} gives no token ids (`return_tokens`); use"
                " build 0c1e570 or newer"
            )
        return description

    async def tokenize(self, server: Server, text: str) -> list[int] | None:
        body = {"content": text, "add_special": False, "parse_special": True}
        tokens: list[int] = (await server.post("/tokenize", body))["tokens"]
        return tokens

    async def embedding(
        self, server: Server, request: EngineRequest, model: str
    ) -> tuple[npt.NDArray[np.float32], int | None]:
        try:
            return await super().embedding(server, request, model)
        except AnsweredFaultError as error:  # status 500, although the prompt is the cause
            if _TOO_LARGE not in str(error):
                raise
            why = f"the prompt has more tokens than llama-server's --ubatch-size ({error})"
            raise RefusedError(why, 413) from None

    async def _lora_fields(self, server: Server) -> dict[str, Any]:
        """Returns the field of a call with the adapter's place in the server's list. A restart of
        the server may change the place. Raises RefusedError unless the list has it once."""
        if self._adapter is None:
            return {}
        cards = await server.get("/lora-adapters")
        ids = [card["id"] for card in cards if Path(card["path"]).stem == self._adapter.name]
        if len(ids) != 1:
            raise RefusedError(
                f"has {len(ids)} LoRA adapters of the name {self._adapter.name!r}; start it with"
                f" --lora, and a file {self._adapter.name}.gguf",
                404,
            )
        return {"lora": [{"id": ids[0], "scale": 1.0}]}

    async def _body(self, server: Server, wanted: Continuation) -> dict[str, Any]:
        fields = await _grammar_fields(server, wanted)
        return {**_sampling(wanted), **fields, **await self._lora_fields(server)}

    async def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
        """Yields chunks with every token.

        A stream leaves out tokens inside of a character. This function requests these tokens again,
        without streaming, and then continues the stream in another call. Sampled outputs are not
        streamed: a second call might draw another token, so tokens inside of characters would
        become rare.
        """
        if wanted.mask is not None:
            yield await self._ask_for_some(server, wanted)
            return
        wanted = replace(wanted, emitted=(output := [*wanted.emitted]))
        while True:
            if wanted.request.params.temperature == 0.0:
                async with aclosing(self._stream(server, wanted)) as chunks:
                    async for chunk in chunks:
                        output += chunk.token_ids
                        yield chunk
                        if chunk.finish_reason is not None:
                            return
            chunk = await self._ask_for_some(server, wanted)
            output += chunk.token_ids
            yield chunk
            if chunk.finish_reason is not None:
                return

    async def _stream(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
        """Yields chunks until the output ends or a token is missing."""
        body = {**await self._body(server, wanted), "stream": True}
        num_reported = 0
        async with server.stream(_COMPLETION, body) as events:
            async for data in events:
                event = read_json(data)
                if message := message_of(event):
                    raise ServerFaultError(message)
                num_reported += len(event["tokens"])
                if num_reported < event["tokens_predicted"]:
                    return
                yield Chunk(event["tokens"], finish_reason=_reason(event))
        raise ServerFaultError("the stream ended without a finish reason")

    async def _ask_for_some(self, server: Server, wanted: Continuation) -> Chunk:
        body = await self._body(server, wanted)
        if wanted.mask is not None:
            body["logit_bias"] += [[token_id, False] for token_id in wanted.mask.forbidden_ids]
        is_rest = body["n_predict"] <= _TOKENS_AT_ONCE
        body["n_predict"] = min(body["n_predict"], _TOKENS_AT_ONCE)
        event = await server.post(_COMPLETION, body, server.idle_seconds)
        reason = _reason(event)
        if reason is FinishReason.LENGTH and not is_rest:
            reason = None
        if not event["tokens"] and reason is None:
            raise ServerFaultError("generated nothing")
        return Chunk(event["tokens"], finish_reason=reason)


def _sampling(wanted: Continuation) -> dict[str, Any]:
    request, params = wanted.request, wanted.request.params
    return {
        "prompt": wanted.prompt,
        "n_predict": wanted.num_left,
        "temperature": params.temperature,
        "top_k": max(0, params.top_k),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        # All tokens. The server reserves memory for this number.
        "repeat_last_n": len(request.prompt_token_ids) + request.max_tokens,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "samplers": ["penalties", "temperature", "min_p", "top_k", "top_p"],
        "seed": (request.seed + len(wanted.emitted))
        % _RANDOM_SEED,  # an output may take several calls
        "logit_bias": [[int(key), by] for key, by in (params.logit_bias or {}).items()],
        "return_tokens": True,
        "response_fields": ["tokens", "tokens_predicted", "stop", "stop_type"],
        "cache_prompt": True,
    }


async def _grammar_fields(server: Server, wanted: Continuation) -> dict[str, Any]:
    """Returns the fields with the request's grammar; none if the server cannot apply the grammar.

    The server tokenises the text of the output again, and follows the grammar along these tokens.
    """
    lark, output = wanted.grammar, wanted.emitted
    grammar = None if lark is None else await asyncio.to_thread(gbnf_of, lark)
    if grammar is None:
        return {}
    fields = {"grammar": grammar, "grammar_type": "tool_calls", "generation_prompt": ""}
    if not output:
        return fields
    text: str = (await server.post("/detokenize", {"tokens": [*output]}))["content"]
    body = {"content": text, "add_special": False, "parse_special": True, "with_pieces": True}
    read, is_safe = b"", "\N{REPLACEMENT CHARACTER}" not in text  # half a character
    for token in (await server.post("/tokenize", body))["tokens"]:
        piece = bytes(
            token["piece"] if isinstance(token["piece"], list) else token["piece"].encode()
        )
        read += piece
        if token["id"] not in output:
            is_end = token["id"] in wanted.request.end_token_ids or _END_TOKEN.fullmatch(piece)
            is_safe = is_safe and not is_end  # an end token here would end the server
    if not is_safe or read != text.encode():  # some tokenizers add a space
        return {}
    return fields | {"generation_prompt": text}


def _reason(event: dict[str, Any]) -> FinishReason | None:
    if not event.get("stop"):
        return None
    kind = event.get("stop_type")
    if kind not in _REASONS:
        raise ServerFaultError(f"ended a stream with {kind!r:.40}")
    return _REASONS[kind]
