"""A server that takes grammars masks by them itself; the worker checks each token all the same.

The stand-in masks as vLLM does, with llguidance and the tokenizer's end token.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from promptq.shared.protocol.output_format import JsonOutput, RegexOutput
from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.text.grammars.llguidance_calls import Vocabulary, compile_grammar, lark_of
from promptq.worker.text.grammars.schema_masks import Grammars
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from promptq.worker.upstream.dialects.dialect import BANNED, Continuation, Mask
from promptq.worker.upstream.dialects.llama_cpp import LlamaCppDialect
from promptq.worker.upstream.dialects.openai_completions import _bias
from promptq.worker.upstream.dialects.transport import Server, ServerFaultError
from promptq.worker.upstream.dialects.vllm import VllmDialect, _put_mask
from promptq.worker.upstream.probing import describe
from promptq.worker.upstream.server_process import server_environment
from promptq.worker.upstream.watched_stream import WatchedStream
from tests.programs.stand_in_server.batch import VOCAB_SIZE
from tests.programs.stand_in_server.starting import (
    DESCRIPTION,
    END_TOKEN_ID,
    StandIn,
    stand_in_server,
)
from tests.worker.text.grammars.structured import SCHEMAS, TOOLS, closed, json_schema, prepare
from tests.worker.upstream.test_server import answering
from tests.worker.upstream.test_watched_streams import (
    GREEDY,
    LONG_SCHEMA,
    close,
    last_of,
    masked,
    served,
    started_engine,
)

REQUESTS: list[dict[str, Any]] = [
    *({"response_format": json_schema(schema)} for schema in SCHEMAS.values()),
    {"response_format": json_schema(LONG_SCHEMA)},
    {"response_format": {"type": "regex", "regex": '[0-9]{3,9}( [a-c"/]+)?'}},
    {"tools": TOOLS, "tool_choice": "required"},
]


@pytest.fixture
def stand_in(model: Path) -> Iterator[StandIn]:
    with stand_in_server("vllm", "--token-seconds", "0", "--grammars", str(model)) as server:
        yield server


def some_requests(rng: random.Random) -> list[dict[str, Any]]:
    said = ["".join(rng.choices("abcdef ", k=8)) for _ in REQUESTS]
    return [
        {"messages": [{"role": "user", "content": text}], **fields, "max_tokens": 60, **GREEDY}
        for text, fields in zip(said, REQUESTS, strict=True)
    ]


async def test_one_call_gives_the_tokens_of_an_engine_that_masks_each_of_them(
    stand_in: StandIn, model: Path
) -> None:
    """After a break the stream is a watched one, since the grammar cannot begin inside."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    here = await served("vllm", stand_in.url, model)
    async with started_engine(here) as engine:
        for fields in some_requests(rng):
            whole, reason = masked(prepare(here, **fields))
            before = stand_in.told()["started"]
            output = await last_of(engine, prepare(here, **fields))
            assert (output.token_ids, output.finish_reason) == (whole, reason), fields
            assert stand_in.told()["started"] == before + 1, fields
            at = rng.randrange(1, len(whole))
            prepared = prepare(here, emitted=whole[:at], **fields)
            if not prepared.is_at_end:
                assert (await last_of(engine, prepared)).token_ids == whole[at:], (at, fields)


@pytest.mark.parametrize("plugin", [[], ["--plugin"]])
async def test_a_probe_finds_whether_grammars_begin_inside_of_an_output(
    model: Path, plugin: list[str]
) -> None:
    """vLLM takes the field without our plugin too, and ignores it."""
    with stand_in_server("vllm", "--grammars", str(model), *plugin) as server:
        client = Server(server.url)
        found = await describe(VllmDialect(), client)
        await client.close()
    assert found.takes_grammars
    assert found.resumes_grammars == bool(plugin)


async def test_with_the_plugin_one_call_continues_inside_of_a_grammar(model: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    options = ("--token-seconds", "0", "--grammars", str(model), "--plugin")
    with stand_in_server("vllm", *options) as server:
        here = await served("vllm", server.url, model)
        async with started_engine(here) as engine:
            for fields in some_requests(rng):
                whole, reason = masked(prepare(here, **fields))
                at = rng.randrange(1, len(whole))
                before = server.told()["started"]
                output = await last_of(engine, prepare(here, emitted=whole[:at], **fields))
                assert (output.token_ids, output.finish_reason) == (whole[at:], reason), fields
                assert server.told()["started"] <= before + 1, fields
            fields = some_requests(rng)[-2]
            server.fail("unmask")
            whole, _ = masked(prepare(here, **fields))
            output = await last_of(engine, prepare(here, emitted=whole[:1], **fields))
            assert output.given_back is not None, "no token outside of the grammar is sent"


def test_vllm_finds_the_plugin_on_its_path() -> None:
    """Where there is no vLLM, or one with other insides, the plugin only writes a warning."""
    program = """
from importlib.metadata import entry_points
import sys
(found,) = entry_points(group="vllm.general_plugins", name="promptq")
found.load()()
assert not [name for name in sys.modules if name.partition(".")[0] in ("promptq", "torch")]
"""
    command = [sys.executable, "-S", "-c", program]
    environment = server_environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "No module named 'vllm'" in done.stderr


@pytest.mark.parametrize(("theirs", "is_replaced"), [("1.7.6", True), ("1.10.0", False)])
def test_a_started_server_has_a_library_that_masks_as_the_worker_does(
    tmp_path: Path, theirs: str, is_replaced: bool
) -> None:
    """An old llguidance of the server is replaced, and a new one stays."""
    package, info = tmp_path / "llguidance", tmp_path / f"llguidance-{theirs}.dist-info"
    for folder, file, text in (
        (package, "__init__.py", "name = 'theirs'"),
        (info, "METADATA", f"Metadata-Version: 2.1\nName: llguidance\nVersion: {theirs}\n"),
    ):
        folder.mkdir()
        (folder / file).write_text(text)
    environment = server_environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    program = "import llguidance; print(llguidance.__file__)"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (Path(done.stdout.strip()).parent != package) == is_replaced


@pytest.mark.parametrize("fault", ["refuse_grammars", "unmask"])
async def test_a_server_that_stops_to_take_grammars_is_watched(
    stand_in: StandIn, model: Path, fault: str
) -> None:
    """An older library refuses some grammars. The worker takes no token on trust."""
    here = await served("vllm", stand_in.url, model)
    fields = {"response_format": json_schema(LONG_SCHEMA), "max_tokens": 60, **GREEDY}
    whole, _ = masked(prepare(here, **fields))
    async with started_engine(here) as engine:
        stand_in.fail(fault)
        output = await last_of(engine, prepare(here, **fields))
        if fault == "refuse_grammars":
            assert output.token_ids == whole
        else:
            assert output.given_back is not None
            assert whole[: len(output.token_ids)] == output.token_ids, "none outside of the grammar"


async def test_silence_is_no_refusal_of_a_grammar(stand_in: StandIn, model: Path) -> None:
    here = await served("vllm", stand_in.url, model)
    request = prepare(here, response_format=json_schema(LONG_SCHEMA)).engine_request
    close(here)
    bodies = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        await asyncio.Event().wait()
        return web.Response()

    async with answering(answer, idle_seconds=0.1) as server:
        description = replace(DESCRIPTION, takes_grammars=True)
        stream = WatchedStream(VllmDialect(), server, request, [], description, VOCAB_SIZE)
        with pytest.raises(ServerFaultError):
            await anext(stream.chunks())
    (body,) = bodies
    assert "structured_outputs" in body["sampling_params"]


PIECES = ['{"k":', '"', "é🦊", " <", "br"]


@pytest.mark.parametrize(
    ("text", "pieces", "is_sent"),
    [
        ("".join(PIECES), PIECES, True),
        ('{"k":"é', ['{"k":"', [0xC3], [0xA9]], True),
        ('{"k":"\N{REPLACEMENT CHARACTER}', ['{"k":"', "\N{REPLACEMENT CHARACTER}"], False),
        ('{"k":"<|im_end|>', ['{"k":"', "<|im_end|>"], False),
        ('{"k":"END', ['{"k":"', END_TOKEN_ID], False),
        ('{"k":"', [' {"k":"'], False),
    ],
)
async def test_llama_cpp_gets_the_output_as_text_if_it_reads_the_same_tokens_in_it(
    text: str, pieces: list[Any], is_sent: bool
) -> None:
    """The server would end at an end token, and would mask wrongly after another text."""
    bodies = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        if request.path == "/detokenize":
            return web.json_response({"content": text})
        if request.path == "/tokenize":
            tokens = [
                {"id": END_TOKEN_ID, "piece": "END"}
                if piece == END_TOKEN_ID
                else {"id": 10_000 + number, "piece": piece}
                for number, piece in enumerate(pieces)
            ]
            return web.json_response({"tokens": tokens if body["with_pieces"] else []})
        bodies.append(body)
        end = {"tokens": [7], "tokens_predicted": 1, "stop": True, "stop_type": "limit"}
        return web.Response(text=f"data: {json.dumps(end)}\n\n")

    request = EngineRequest(
        0, [0], SamplingParams(**GREEDY), 0, max_tokens=9, end_token_ids=frozenset({END_TOKEN_ID})
    )
    async with answering(answer) as server:
        grammar = '%llguidance {}\nstart: "{" /.*/'
        wanted = Continuation(request, [5, 6], "m", grammar=grammar)
        stream = LlamaCppDialect().generate(server, wanted)
        assert [chunk.token_ids async for chunk in stream] == [[7]]
    (body,) = bodies
    assert body.get("generation_prompt") == (text if is_sent else None)
    assert ("grammar" in body) == is_sent


async def test_bad_words_are_watched_beside_a_grammar(stand_in: StandIn, model: Path) -> None:
    here = await served("vllm", stand_in.url, model)
    form = json_schema(closed(k={"type": "string"}))
    fields = {"response_format": form, "bad_words": [*"abcde"], "max_tokens": 40, **GREEDY}
    whole, reason = masked(prepare(here, **fields))
    async with started_engine(here) as engine:
        output = await last_of(engine, prepare(here, **fields))
    assert (output.token_ids, output.finish_reason) == (whole, reason)
    assert reason is FinishReason.LENGTH or bytes(whole).endswith(b"}")


def test_a_grammar_has_no_text_for_servers_with_another_end_token(model: Path) -> None:
    """They would forbid the request's end tokens where the output may end or go on."""
    tokenizer = HuggingFaceTokenizer.load(str(model))
    grammars = Grammars(tokenizer, VOCAB_SIZE, frozenset({END_TOKEN_ID}))
    several = frozenset({END_TOKEN_ID, 10})
    digits = RegexOutput("[0-9]+")
    assert grammars.start(digits, frozenset({END_TOKEN_ID})).source is not None
    assert grammars.start(digits, several).source is None
    assert grammars.start(JsonOutput({"type": "integer"}, True), several).source is None
    assert grammars.start(JsonOutput({"type": "object"}, True), several).source is not None


def test_lark_text_has_the_masks_of_each_form_of_a_grammar(model: Path) -> None:
    from llguidance import LLMatcher

    content = (model / "tokenizer.json").read_text()
    vocabulary = Vocabulary(content, VOCAB_SIZE, [END_TOKEN_ID]).load()
    options: Any = {"whitespace_pattern": "[ ]"}
    schema = {"type": "object", "properties": {"é\n": {"enum": ["ü", 7]}}, "required": ["é\n"]}
    texts = [
        LLMatcher.grammar_from_json_schema(schema, overrides=options),
        LLMatcher.grammar_from_regex('a/b"[0-9]+'),
        LLMatcher.grammar_from_lark('start: "ab" /[0-9]+/'),
        LLMatcher.grammar_from_lark('%llguidance {}\nstart: "ab" /[0-9]+/'),
    ]
    for text in texts:
        ours, lark = (compile_grammar(vocabulary, each) for each in (text, lark_of(text)))
        for _ in range(30):
            bits = ours.compute_bitmask()
            assert lark.compute_bitmask() == bits, text
            allowed = [t for t in range(VOCAB_SIZE) if bits[t // 8] >> t % 8 & 1]
            if ours.is_stopped() or allowed == [END_TOKEN_ID]:
                break
            assert ours.consume_token(allowed[0])
            assert lark.consume_token(allowed[0])


def test_a_mask_as_a_grammar_allows_the_same_tokens(model: Path) -> None:
    content = (model / "tokenizer.json").read_text()
    vocabulary = Vocabulary(content, VOCAB_SIZE, [END_TOKEN_ID]).load()
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for share in (0.01, 0.5, 0.99):
        allowed = rng.random(VOCAB_SIZE) < share
        allowed[[0, END_TOKEN_ID]] = True
        matcher = compile_grammar(vocabulary, Mask(allowed, ()).grammar)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        found = np.unpackbits(bits, bitorder="little")[:VOCAB_SIZE].astype(bool)
        assert found.tolist() == allowed.tolist()


@pytest.mark.parametrize(
    ("num_allowed", "takes_grammars", "sent"),
    [
        (1024, True, {"allowed_token_ids": 1024}),
        (4096 - 1000, True, {"logit_bias": 1001}),
        (2000, True, {"structured_outputs": 1}),
        (2000, False, {"logit_bias": 1024}),
    ],
)
async def test_vllm_gets_as_much_of_a_mask_as_its_fields_take(
    num_allowed: int, takes_grammars: bool, sent: dict[str, int]
) -> None:
    """With a bias of the request, which stays."""
    bodies = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        choice = '{"token_ids": [5], "finish_reason": "length"}'
        return web.Response(text=f'data: {{"choices": [{choice}]}}\n\n')

    allowed = np.zeros(4096, bool)
    allowed[:num_allowed] = True
    mask = Mask(allowed, (4000, 3999), may_be_grammar=takes_grammars)
    params = SamplingParams(logit_bias={"1": 2.0})
    request = EngineRequest(0, [0], params, seed=0, max_tokens=9)
    async with answering(answer) as server:
        async for _ in VllmDialect().generate(server, Continuation(request, [], "m", mask)):
            pass
    sampling = bodies[0]["sampling_params"]
    found = {name: len(sampling[name]) for name in sent}
    assert found == sent
    names = {"allowed_token_ids", "structured_outputs"} & sampling.keys()
    assert names == {*sent} - {"logit_bias"}
    assert sampling["logit_bias"]["1"] == 2.0
    if "logit_bias" in sent:
        assert {"4000", "3999", str(num_allowed)} <= sampling["logit_bias"].keys()
    assert sampling["max_tokens"] == 1


@pytest.mark.parametrize("first", [0, 3000])
def test_as_many_biases_as_vllm_takes_leave_room_for_bans(first: int) -> None:
    allowed = np.zeros(4096, bool)
    allowed[:2000] = True
    biases = {str(first + nth): nth / 1024 for nth in range(1024)}
    sampling: dict[str, Any] = {"logit_bias": biases}
    _put_mask(sampling, Mask(allowed, (4000, 3999)))
    sent = sampling["logit_bias"]
    assert len(sent) == 1024
    assert sent["4000"] == sent["3999"] == BANNED
    kept = {name for name, by in sent.items() if by != BANNED}
    assert kept == ({str(nth) for nth in range(2, 1024)} if first == 0 else set())


@pytest.mark.parametrize(("num_biases", "num_sent"), [(1, 300), (299, 300), (400, 402)])
def test_biases_leave_room_for_bans_of_what_was_chosen(num_biases: int, num_sent: int) -> None:
    allowed = np.zeros(4096, bool)
    allowed[:2000] = True
    own = {str(token_id): 1.0 for token_id in range(num_biases)}
    sent = _bias(own, Mask(allowed, (4000, 3999) if num_biases > 300 else (4000,)))
    assert len(sent) == num_sent
    assert sent["4000"] == -100.0
    assert own.items() <= sent.items()


def test_sums_of_penalties_stay_within_what_openais_api_takes() -> None:
    own = {"1": -250.0, "2": 130.0, "3": -0.5}
    assert _bias(own, None) == {"1": -100.0, "2": 100.0, "3": -0.5}
    allowed = np.zeros(4096, bool)
    for others in ([1, 3], [1, 2]):
        allowed[:] = False
        allowed[others] = True
        sent = _bias(own, Mask(allowed, (7,)))
        assert all(-100.0 <= by <= 100.0 for by in sent.values())
