"""SGLang's server through `/v1/completions`, which takes and returns token ids.

SGLang's `/generate` would repeat the whole output in each event. Tried with SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

from promptq.shared.errors import ConfigurationError
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.upstream.dialects.dialect import (
    BANNED,
    Continuation,
    Mask,
    ServerDescription,
    salt_of,
    server_abilities,
)
from promptq.worker.upstream.dialects.openai_completions import COMPLETIONS, OpenAIDialect
from promptq.worker.upstream.dialects.transport import Server, answering_as


class SglangDialect(OpenAIDialect):
    """SGLang's dialect. `is_exact`: the server computes in fp32, so greedy streams resume
    exactly."""

    def __init__(
        self, *, is_exact: bool = False, shares_prefixes: bool = False, **_: object
    ) -> None:
        self._shares_prefixes = shares_prefixes
        self.abilities = server_abilities(
            logprobs=False,  # it reports no ranks, and the values after temperature and biases
            unheeded=frozenset(
                {
                    "bad_words",
                    "min_tokens",  # it would also forbid end tokens that the request ignores
                    "repetition_penalty",  # it would not count the prompt
                    "speculative_tokens",
                }
            ),
            exact_resume=is_exact,
            inexact_with=frozenset({"temperature"}),  # it ignores seeds, unless deterministic
        )

    def start_command(self, settings: WorkerSettings, port: int) -> list[str]:
        command = [
            *(settings.engine_command or "sglang", "serve", "--model-path", str(settings.model)),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", settings.dtype),
            *("--max-running-requests", str(settings.max_num_seqs)),
            *("--grammar-backend", "llguidance", "--enable-metrics"),
        ]
        if settings.max_model_len is not None:
            command += ["--context-length", str(settings.max_model_len)]
        return [*command, *settings.engine_arguments]

    async def describe(self, server: Server) -> ServerDescription:
        with answering_as("SGLang's server", server):
            info = await server.get("/server_info")
            description = ServerDescription(
                software=f"SGLang {info['version']!s:.80}",
                model=info["served_model_name"],
                max_model_len=int(info["max_req_input_len"]),  # it keeps some tokens of room
                kv_tokens=int(info["max_total_num_tokens"]),
                block_size=int(info["page_size"]),
                model_dir=info["model_path"],
                is_invariant=info["enable_deterministic_inference"] is True,
            )
            probe = {"max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
            body = {"model": description.model, "prompt": _prompt([0]), **probe}
            (choice,) = (await server.post(COMPLETIONS, body))["choices"]
        if not choice.get("token_ids"):
            raise ConfigurationError(
                f"--upstream: SGLang at {server.url} gives no token ids (`return_token_ids`); use"
                " 0.5.23 or newer"
            )
        return description

    async def tokenize(self, server: Server, text: str) -> list[int] | None:
        body = {"prompt": text, "add_special_tokens": False}
        tokens: list[int] = (await server.post("/tokenize", body))["tokens"]
        return tokens

    def body(self, wanted: Continuation) -> dict[str, Any]:
        request, params = wanted.request, wanted.request.params
        ends = sorted(request.end_token_ids)
        body = {
            "model": wanted.model,
            "prompt": _prompt(wanted.prompt),
            "max_tokens": wanted.num_left,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k if params.top_k > 0 else -1,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "logit_bias": params.logit_bias,
            "seed": request.seed,
            # It also stops at its own end tokens, and ignores all of these or none.
            "stop_token_ids": ends,
            "ignore_eos": not ends,
            "return_token_ids": True,
            "stream": True,
            **salt_of(request, shares_prefixes=self._shares_prefixes),
        }
        if wanted.mask is not None:
            _put_mask(body, wanted.mask)
        if wanted.grammar is not None:
            body["ebnf"] = wanted.grammar
        return body


def _prompt(token_ids: list[int]) -> list[int] | list[list[int]]:
    """Returns a prompt in the server's form. The server takes a plain list of zeros as empty."""
    return token_ids if any(token_ids) else [token_ids]


def _put_mask(body: dict[str, Any], mask: Mask) -> None:
    if mask.is_grammar_beside(body["logit_bias"]):
        body["ebnf"] = mask.grammar
    else:
        bans = dict.fromkeys(map(str, mask.forbidden_ids), BANNED)
        body["logit_bias"] = mask.allowed_of(body["logit_bias"]) | bans
