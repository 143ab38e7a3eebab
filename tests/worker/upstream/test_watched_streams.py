"""Rules that a server does not know hold on its streams, token by token, across faults and deaths.

The stand-in writes letters, which break almost every rule.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from promptq import Client
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.claims import ModelIdentity
from promptq.shared.protocol.request import FinishReason
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.api.messages import SequenceOutput
from promptq.worker.leases.rows import PreparedRequest
from promptq.worker.serve.build import Served, build
from promptq.worker.text.grammars.schema_masks import Grammars
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from promptq.worker.upstream.dialects.dialect import ServerDescription
from promptq.worker.upstream.dialects.openai_completions import OpenAIDialect
from promptq.worker.upstream.forwarding_engine import ForwardingEngine
from tests.programs.stand_in_server.batch import VOCAB_SIZE, next_token
from tests.programs.stand_in_server.starting import (
    END_TOKEN_ID,
    StandIn,
    limits_of,
    stand_in_server,
)
from tests.support.model_free import finished, running_worker
from tests.support.processes import started
from tests.support.requests import async_put, until_tokens
from tests.support.roles import as_role
from tests.support.waiting import async_until
from tests.worker.text.grammars.structured import SCHEMAS, TOOLS, closed, json_schema, prepare

NAMES = ("vllm", "llama.cpp", "sglang")
GREEDY: dict[str, Any] = {"temperature": 0.0}
LONG_SCHEMA = closed(
    fox={"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 9, "maxItems": 9}
)
"""Its outputs have more than 40 tokens."""


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return cast("str", request.param)


@pytest.fixture
def stand_in(name: str) -> Iterator[StandIn]:
    with stand_in_server(name, "--token-seconds", "0.001") as server:
        yield server


async def served(name: str, url: str, model: Path) -> Served:
    """Build it in a thread: it runs an event loop while it looks at the server."""
    return await asyncio.to_thread(built, name, url, model)


def built(name: str, url: str, model: Path) -> Served:
    return build(WorkerSettings(engine=name, model=str(model), upstream=url, dtype="float32"))


@asynccontextmanager
async def started_engine(served: Served) -> AsyncIterator[ForwardingEngine]:
    engine = cast("ForwardingEngine", served.engine)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop(1.0)
        close(served)


def close(served: Served) -> None:
    """End the process that tries out schemas."""
    assert served.grammars is not None
    served.grammars.close()


async def last_of(engine: ForwardingEngine, prepared: PreparedRequest) -> SequenceOutput:
    """All tokens of a sequence, with its end."""
    engine.add(prepared.engine_request)
    tokens: list[int] = []
    while True:
        for step in await engine.fetch():
            for output in step.outputs:
                tokens += output.token_ids
                if output.finish_reason is not None or output.given_back is not None:
                    output.token_ids = tokens
                    return output


def masked(prepared: PreparedRequest) -> tuple[list[int], FinishReason]:
    """The greedy tokens of a stand-in that masks each of them as the native engine does."""
    request = prepared.engine_request
    grammar, output = request.grammar, [*request.output_token_ids]
    while len(output) < request.max_tokens:
        banned = {
            bad[-1] for bad in request.bad_token_sequences if (*output, bad[-1])[-len(bad) :] == bad
        }
        if len(output) < request.params.min_tokens:
            banned |= request.end_token_ids
        allowed = None
        if grammar is not None:
            masks = np.zeros((1, grammar.masker.num_words), np.int32)
            assert not grammar.masker.fill([grammar], masks)
            bits = int.from_bytes(masks.tobytes(), "little")
            allowed = {token_id for token_id in range(END_TOKEN_ID + 1) if bits >> token_id & 1}
        token = next_token([*request.prompt_token_ids, *output], None, banned, allowed)
        output.append(token)
        if token in request.end_token_ids:
            return output, FinishReason.STOP
        if grammar is not None:
            grammar.accept(token)
            if grammar.is_complete:
                return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def some_requests(rng: random.Random) -> list[dict[str, Any]]:
    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    pair = "".join(rng.choices(letters, k=2))
    outputs = [
        *({"response_format": json_schema(schema)} for schema in SCHEMAS.values()),
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "regex", "regex": "[0-9]{3,9}( [a-c]+)?"}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"bad_words": [*rng.sample(letters, 5), pair]},
        {"min_tokens": 30, "stop_token_ids": [ord(letter) for letter in rng.sample(letters, 9)]},
    ]
    said = ["".join(rng.choices("abcdef ", k=8)) for _ in outputs]
    return [
        {"messages": [{"role": "user", "content": text}], **output}
        for text, output in zip(said, outputs, strict=True)
    ]


async def test_greedy_tokens_are_those_of_an_engine_that_masks_each_of_them(
    name: str, stand_in: StandIn, model: Path
) -> None:
    """So are they after any number of tokens of an earlier attempt."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    here = await served(name, stand_in.url, model)
    async with started_engine(here) as engine:
        for fields in some_requests(rng):
            fields |= {"max_tokens": 60, **GREEDY}
            whole, reason = masked(prepare(here, **fields))
            output = await last_of(engine, prepare(here, **fields))
            assert (output.token_ids, output.finish_reason) == (whole, reason), fields
            at = rng.randrange(1, len(whole)) if len(whole) > 1 else 0
            prepared = prepare(here, emitted=whole[:at], **fields)
            if not prepared.is_at_end:
                assert (await last_of(engine, prepared)).token_ids == whole[at:], (at, fields)


@pytest.mark.matrix(1)
async def test_sampled_tokens_obey_the_schema(name: str, stand_in: StandIn, model: Path) -> None:
    here = await served(name, stand_in.url, model)
    async with started_engine(here) as engine:
        for seed in range(5):
            form = json_schema(LONG_SCHEMA)
            prepared = prepare(here, seed=seed, max_tokens=300, response_format=form)
            output = await last_of(engine, prepared)
            assert output.finish_reason is FinishReason.STOP
            jsonschema.validate(json.loads(bytes(output.token_ids)), LONG_SCHEMA)


@pytest.mark.matrix(1)
async def test_a_forced_call_comes_as_a_call(
    redis_url: str, queue: AsyncRequestQueue, name: str, stand_in: StandIn, model: Path
) -> None:
    messages = [{"role": "user", "content": "a"}]
    fields = {"messages": messages, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
    async with running_worker(redis_url, await served(name, stand_in.url, model)):
        result = await finished(queue, await async_put(queue, **fields, **GREEDY))
    assert result["finish_reason"] == "stop"
    call = json.loads(result["text"])
    functions = {tool["function"]["name"]: tool["function"] for tool in TOOLS}
    jsonschema.validate(call["arguments"], functions[call["name"]].get("parameters", {}))


@pytest.mark.parametrize("fault", ["break", "end"])
async def test_a_stream_that_is_broken_off_goes_on_inside_of_its_grammar(
    redis_url: str, queue: AsyncRequestQueue, model: Path, fault: str
) -> None:
    fields = {"prompt": "a", "max_tokens": 400, "response_format": json_schema(LONG_SCHEMA)}
    with stand_in_server("vllm", "--token-seconds", "0.01") as stand_in:
        here = await served("vllm", stand_in.url, model)
        whole, _ = masked(prepare(here, **fields, **GREEDY))
        async with running_worker(redis_url, here):
            request_id = await async_put(queue, **fields, **GREEDY)
            for number in (5, 20, 35):
                await until_tokens(queue, request_id, number)
                stand_in.fail(fault)
            result = await finished(queue, request_id)
    assert (result["token_ids"], result["finish_reason"]) == (whole, "stop")
    jsonschema.validate(json.loads(result["text"]), LONG_SCHEMA)


@pytest.mark.matrix(1)
def test_another_worker_goes_on_inside_of_a_grammar(
    redis_url: str, tmp_path: Path, name: str, model: Path
) -> None:
    fields = {"prompt": "a", "max_tokens": 400, "response_format": json_schema(LONG_SCHEMA)}
    with stand_in_server(name, "--token-seconds", "0.02") as stand_in:
        here = built(name, stand_in.url, model)
        whole, _ = masked(prepare(here, **fields, **GREEDY))
        close(here)
        options = ("--engine", name, "--upstream", stand_in.url, "--model", str(model))
        options += ("--dtype", "float32", "--lease-ms", "1000", "--max-crashes", "50")
        with Client(as_role("operator", redis_url)) as client:
            request_id = client.enqueue(**fields, **GREEDY)
            for number in (3, 12, 30):
                with started(tmp_path, redis_url, *options) as worker:
                    for event in client.stream(request_id):
                        if event.index >= number:
                            break
                    worker.process.kill()
            with started(tmp_path, redis_url, *options):
                result = client.result(request_id)
    assert (result.token_ids, result.finish_reason) == (whole, "stop")
    jsonschema.validate(json.loads(result.text), LONG_SCHEMA)


@pytest.mark.matrix(1)
async def test_a_server_that_chooses_outside_of_a_mask_is_to_blame(
    name: str, stand_in: StandIn, model: Path
) -> None:
    here = await served(name, stand_in.url, model)
    form = json_schema(LONG_SCHEMA)
    async with started_engine(here) as engine:
        stand_in.fail("unmask")
        for _ in range(2):
            output = await last_of(engine, prepare(here, response_format=form, **GREEDY))
            assert output.given_back is not None
            assert not output.given_back.is_blamed
        output = await last_of(engine, prepare(here, response_format=form, **GREEDY))
        assert str(output.error) == (
            "the inference server's answer cannot be used: the server chose tokens outside of the"
            " mask"
        )
        assert not output.is_refused
        assert engine.is_accepting


async def test_penalties_that_would_not_count_all_tokens_are_refused(
    name: str, stand_in: StandIn, model: Path
) -> None:
    """Each call of a watched stream has the earlier tokens in its prompt, and their penalties as
    biases, which another penalty would scale."""
    here = await served(name, stand_in.url, model)
    for fields in ({"response_format": json_schema(LONG_SCHEMA)}, {"bad_words": ["a"]}):
        field = "repetition_penalty" if name == "sglang" else "presence_penalty"
        with pytest.raises(InvalidRequestError, match=rf"^{field}: .* worker's engine"):
            prepare(here, presence_penalty=1.0, repetition_penalty=1.1, **fields)
        if name != "llama.cpp":
            prepare(here, presence_penalty=1.0, **fields)
    close(here)


@pytest.mark.matrix(1)
async def test_rules_that_leave_no_token_are_the_requests_fault(
    name: str, stand_in: StandIn, model: Path
) -> None:
    here = await served(name, stand_in.url, model)
    form = {"type": "regex", "regex": "[ab]+"}
    async with started_engine(here) as engine:
        prepared = prepare(here, response_format=form, bad_words=["a", "b"], **GREEDY)
        output = await last_of(engine, prepared)
        assert (output.is_refused, output.token_ids) == (True, [])
        assert "no token can be chosen" in str(output.error)


async def test_a_server_that_ignores_masks_gets_no_request_that_needs_them(
    name: str, stand_in: StandIn, model: Path
) -> None:
    stand_in.fail("unmask")
    here = await served(name, stand_in.url, model)
    assert {"response_format", "tool_choice", "bad_words"} <= {*here.engine.abilities.refused}
    for field in ({"response_format": json_schema(LONG_SCHEMA)}, {"bad_words": ["a"]}):
        with pytest.raises(InvalidRequestError, match="no live worker's engine serves it"):
            prepare(here, **field)
    stand_in.fail("")
    here = await served(name, stand_in.url, model)
    assert not {"response_format", "bad_words", "min_tokens"} & {*here.engine.abilities.refused}


async def test_abilities_are_found_out_again_when_a_server_comes_back(
    name: str, stand_in: StandIn, model: Path
) -> None:
    here = await served(name, stand_in.url, model)
    form = {"response_format": json_schema(LONG_SCHEMA)}
    async with started_engine(here) as engine:
        for fault, lacks_masks in (("unmask", True), ("", False)):
            stand_in.fail("overload")
            given_back = (await last_of(engine, prepare(here, max_tokens=9))).given_back
            assert given_back is not None
            stand_in.fail(fault)
            await async_until(lambda: engine.is_accepting)
            assert ("response_format" in engine.abilities.refused) is lacks_masks
            with pytest.raises(InvalidRequestError) if lacks_masks else nullcontext():
                prepare(here, **form)


async def lost_contact(engine: ForwardingEngine, stand_in: StandIn, here: Served) -> None:
    stand_in.fail("overload")
    given_back = (await last_of(engine, prepare(here, max_tokens=9))).given_back
    assert given_back is not None


async def test_a_refusal_by_a_proxy_takes_no_ability_away(model: Path) -> None:
    with stand_in_server("vllm") as stand_in:
        here = await served("vllm", stand_in.url, model)
        async with started_engine(here) as engine:
            await lost_contact(engine, stand_in, here)
            stand_in.fail("forbid_masks")
            before = stand_in.told()["ended"]
            await async_until(lambda: engine.is_accepting or stand_in.told()["ended"] > before + 12)
            assert not engine.is_accepting, "it has looked more than once"
            stand_in.fail("")
            await async_until(lambda: engine.is_accepting)
            assert "response_format" not in engine.abilities.refused


@pytest.mark.matrix(1)
async def test_an_ability_is_lost_only_if_the_server_lacks_it_twice(
    name: str, stand_in: StandIn, model: Path
) -> None:
    here = await served(name, stand_in.url, model)
    async with started_engine(here) as engine:
        await lost_contact(engine, stand_in, here)
        stand_in.fail("unmask")
        looks = engine._recovery.wait_until_well
        found: list[ServerDescription] = []

        async def look(*arguments: Any) -> ServerDescription:
            found.append(await looks(*arguments))
            stand_in.fail("")
            return found[-1]

        engine._recovery.wait_until_well = look  # type: ignore[method-assign]
        await async_until(lambda: engine.is_accepting)
        assert [each.heeds_masks for each in found] == [False, True]
        assert "response_format" not in engine.abilities.refused


async def complete(request: web.Request) -> web.Response:
    """Answers as `/v1/completions` does, with one event. It knows no masks but `logit_bias`."""
    body = await request.json()
    bias = {int(key): by for key, by in (body.get("logit_bias") or {}).items()}
    banned = {token_id for token_id, by in bias.items() if by == -100}
    tokens = body["prompt"]
    for _ in range(body["max_tokens"]):
        lifted = {token_id for token_id, by in bias.items() if by == 100} - banned
        tokens.append(next_token(tokens, None, banned, lifted or None))
    choice = {"token_ids": tokens[-body["max_tokens"] :], "finish_reason": "length", "text": "x"}
    event = json.dumps({"choices": [choice]})
    return web.Response(text=f"data: {event}\n\ndata: [DONE]\n\n")


async def test_biases_are_masks_for_servers_that_know_nothing_else(model: Path) -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    dialect = OpenAIDialect(is_exact=True)
    description = ServerDescription("s", "m", 1024, heeds_masks=True)
    tokenizer, ends = HuggingFaceTokenizer.load(str(model)), frozenset({END_TOKEN_ID})
    async with TestServer(app) as there:
        url = str(there.make_url("")).rstrip("/")
        engine = ForwardingEngine(url, None, dialect, limits_of(), description, 60.0)
        grammars = Grammars(tokenizer, VOCAB_SIZE, ends)
        here = Served(engine, tokenizer, ModelIdentity(), ends, url, "float32", grammars=grammars)
        async with started_engine(here):
            for schema in SCHEMAS.values():
                fields = {"response_format": json_schema(schema), "max_tokens": 60, **GREEDY}
                whole = masked(prepare(here, **fields))
                for more in ({}, {"logit_bias": {str(VOCAB_SIZE - 1): 1.0}}):
                    output = await last_of(engine, prepare(here, **fields, **more))
                    assert (output.token_ids, output.finish_reason) == whole, (schema, more)
