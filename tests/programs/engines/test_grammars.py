"""Schemas through a real vLLM, llama.cpp and SGLang: the tokens are those of the native engine,
even if a worker or server dies.

All three servers can also apply grammars. llama.cpp, and vLLM with promptq's plugin, can begin a
grammar inside of an output.

Skipped where the servers are not built.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from promptq import Client
from promptq.shared.errors import InvalidRequestError
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.grammars.gbnf import gbnf_of
from promptq.worker.upstream.connecting import DIALECTS
from promptq.worker.upstream.dialects.dialect import Chunk, Continuation, ServerDescription
from promptq.worker.upstream.dialects.llama_cpp import LlamaCppDialect
from promptq.worker.upstream.dialects.sglang import SglangDialect
from promptq.worker.upstream.dialects.transport import Server
from promptq.worker.upstream.dialects.vllm import VllmDialect
from promptq.worker.upstream.probing import describe
from promptq.worker.upstream.watched_stream import WatchedStream
from tests.programs.engines.real_servers import GREEDY, RealServer
from tests.support.processes import started
from tests.support.roles import as_role
from tests.worker.text.grammars.structured import (
    SCHEMAS,
    TOOLS,
    closed,
    json_schema,
    prepare,
    run,
    served,
)
from tests.worker.text.grammars.test_gbnf import outputs
from tests.worker.text.grammars.test_grammars import END, grammars, walk

STORY = closed(
    hero={"type": "string", "minLength": 20, "maxLength": 60},
    place={"type": "string", "minLength": 20, "maxLength": 60},
    friends={"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3},
)
"""The model writes texts, which masks of many tokens bound."""
CHAT = [{"role": "user", "content": "Who is the hero?"}]
REQUESTS: list[dict[str, Any]] = [
    *({"prompt": "Once", "response_format": json_schema(it)} for it in [STORY, *SCHEMAS.values()]),
    {"prompt": "One day", "response_format": json_schema(STORY), "bad_words": ["a", "the"]},
    {"prompt": "One day", "bad_words": ["was", " a", " girl"]},
    {"messages": CHAT, "tools": TOOLS, "tool_choice": "required"},
]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """Returns the native engine's tokens of each request."""
    native = served()
    return [
        it.token_ids for it in run(native, *(prepare(native, **it, **GREEDY) for it in REQUESTS))
    ]


def test_greedy_tokens_are_the_native_engines_whichever_worker_dies(
    redis_url: str, tmp_path: Path, server: RealServer, wanted: list[list[int]]
) -> None:
    options = ("--engine", server.name, "--upstream", server.url, "--model", str(MODEL_DIR))
    options += ("--dtype", "float32", "--lease-ms", "2000", "--max-crashes", "50")
    with Client(as_role("operator", redis_url)) as client:
        with started(tmp_path, redis_url, *options) as first:
            ids = [client.enqueue(**fields, **GREEDY) for fields in REQUESTS]
            for event in client.stream(ids[0]):
                if event.index >= 10:
                    break
            first.process.kill()
        with started(tmp_path, redis_url, *options):
            results = [client.result(request_id) for request_id in ids]
    for fields, tokens, result in zip(REQUESTS, wanted, results, strict=True):
        assert result.token_ids == tokens, fields
        if "response_format" in fields and result.finish_reason == "stop":
            schema = fields["response_format"]["json_schema"]["schema"]
            jsonschema.validate(json.loads(result.text), schema)


class Counting:
    """A dialect that records for each call whether the call has a mask."""

    def __init__(self) -> None:
        super().__init__(is_exact=True)
        self.calls: list[bool] = []

    async def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
        self.calls.append(wanted.mask is not None)
        async for chunk in super().generate(server, wanted):
            yield chunk


class CountingVllm(Counting, VllmDialect):
    pass


class CountingLlamaCpp(Counting, LlamaCppDialect):
    pass


class CountingSglang(Counting, SglangDialect):
    pass


COUNTING = {"vllm": CountingVllm, "llama.cpp": CountingLlamaCpp, "sglang": CountingSglang}


async def forwarded(
    server: RealServer, emitted: Sequence[int] = (), *, resumes: bool = True, **fields: Any
) -> tuple[list[int], list[bool]]:
    """Returns the tokens after `emitted`, and for each call whether it had a mask."""
    dialect, client = COUNTING[server.name](), Server(server.url)
    request = prepare(served(), emitted=[*emitted], **fields, **GREEDY).engine_request
    description = ServerDescription(
        server.name, "m", 1024, takes_grammars=True, resumes_grammars=resumes
    )
    stream = WatchedStream(dialect, client, request, emitted, description, 2048)
    try:
        return [each async for chunk in stream.chunks() for each in chunk.token_ids], dialect.calls
    finally:
        await client.close()


async def test_a_server_applies_a_grammar_from_its_beginning_and_inside(
    server: RealServer, wanted: list[list[int]]
) -> None:
    client = Server(server.url)
    found = await describe(DIALECTS[server.name](), client)
    await client.close()
    assert found.takes_grammars
    resumes = found.resumes_grammars
    assert resumes is (server.name != "sglang")
    fields, tokens = REQUESTS[0], wanted[0]
    for at in (0, 9, 40):
        output, calls = await forwarded(server, tokens[:at], resumes=resumes, **fields)
        assert output == tokens[at:], at
        if at and not resumes:
            continue
        most = 7 if server.name == "llama.cpp" else 1
        assert len(calls) <= most, "a watched stream takes 34 calls"
        assert not any(calls), "no token had to be chosen under a mask"


async def test_the_text_of_an_end_token_does_not_end_llama_cpp(server: RealServer) -> None:
    if server.name != "llama.cpp":
        pytest.skip("vLLM gets token ids")
    native = served()
    letters = ['{"k":"', *"<|im_end|>"]
    emitted = [token_id for text in letters for token_id in native.tokenizer.encode_text(text)]
    assert END not in emitted
    fields = {"prompt": "Once", "response_format": json_schema(closed(k={"type": "string"}))}
    (whole,) = run(native, prepare(native, emitted=emitted, **fields, **GREEDY))
    output, _ = await forwarded(server, emitted, **fields)
    assert output == whole.token_ids


def test_llama_cpp_reads_each_text_of_a_grammar(server: RealServer) -> None:
    if server.name != "llama.cpp":
        pytest.skip("vLLM takes our own form")
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    compiled, num_read = grammars(), 0
    for form in outputs(random.Random(seed)):
        try:
            grammar = compiled.start(form, frozenset({END}))
        except InvalidRequestError:
            continue
        tokens = walk(grammar, seed)[:60]
        text = compiled._tokenizer.decode(tokens)
        if "\N{REPLACEMENT CHARACTER}" in text or {*tokens} & {0, 1, 2, 3}:
            continue
        body = {
            "prompt": [5],
            "n_predict": 1,
            "grammar": gbnf_of(grammar.source or ""),
            "grammar_type": "tool_calls",
            "generation_prompt": text,
        }
        answer = httpx2.post(f"{server.url}/completion", json=body, timeout=60)
        assert answer.status_code == 200, (answer.text, text, body["grammar"])
        num_read += 1
    assert num_read > 30
