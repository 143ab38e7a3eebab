"""Malformed answers of an inference server, and their results."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.messages import LEAST, EngineRequest, SequenceOutput
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from promptq.worker.upstream.connecting import FoundServer
from promptq.worker.upstream.dialects.dialect import Continuation, Dialect, ServerDescription
from promptq.worker.upstream.dialects.llama_cpp import LlamaCppDialect
from promptq.worker.upstream.dialects.openai_completions import OpenAIDialect
from promptq.worker.upstream.dialects.transport import (
    OverloadedError,
    RefusedError,
    Server,
    ServerFaultError,
    _events,
    malformed_as_fault,
)
from promptq.worker.upstream.dialects.vllm import VllmDialect
from promptq.worker.upstream.forwarding_engine import ForwardingEngine
from tests.programs.stand_in_server.starting import DESCRIPTION, limits_of
from tests.support.servers import free_port


@asynccontextmanager
async def answering(handler: web.Handler, idle_seconds: float = 60.0) -> AsyncIterator[Server]:
    """The client of a server that answers each call so."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with (
        TestServer(app) as there,
        talking_to(str(there.make_url("")).rstrip("/"), idle_seconds) as server,
    ):
        yield server


@asynccontextmanager
async def talking_to(url: str, idle_seconds: float = 60.0) -> AsyncIterator[Server]:
    server = Server(url, idle_seconds=idle_seconds)
    try:
        yield server
    finally:
        await server.close()


async def read(server: Server) -> list[bytes]:
    """All events of a stream."""
    async with server.stream("/", {}) as events:
        return [data async for data in events]


@pytest.mark.parametrize(
    ("told", "seconds"),
    [("3", 3.0), ("0", 0.0), ("-1", 0.0), ("86400", 60.0), ("inf", None), ("nan", None)],
)
async def test_the_time_to_come_back_is_a_time_to_wait_for(
    told: str, seconds: float | None
) -> None:
    async def overloaded(_: web.Request) -> web.Response:
        return web.Response(status=503, headers={"Retry-After": told})

    async with answering(overloaded) as server:
        with pytest.raises(OverloadedError) as caught:
            await server.get("/")
    assert caught.value.seconds == seconds


async def test_an_event_without_an_end_does_not_fill_the_memory() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 2**16)

    async with answering(endless) as server:
        with pytest.raises(ServerFaultError, match="a line of more than"):
            await read(server)


async def test_a_server_that_is_away_is_named_with_the_reason_alone() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with talking_to(url) as server:
        with pytest.raises(ServerFaultError, match=f"^{url}: Connection refused$"):
            await server.get("/")


async def test_a_server_of_another_protocol_is_named_as_such() -> None:
    def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+PONG\r\n")
        writer.close()

    other = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with other, talking_to(f"http://127.0.0.1:{port_of(other)}") as server:
        with pytest.raises(ServerFaultError, match="does not answer as an HTTP server"):
            await server.get("/")


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


@pytest.mark.parametrize("status", [200, 302, 404, 500, 503])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_body_without_an_end_is_read_in_part(status: int, is_stream: bool) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        while True:
            await response.write(b"x" * 2**16)
            sent += 2**16

    async with answering(endless) as server:
        with pytest.raises((ServerFaultError, OverloadedError, RefusedError)) as raised:
            await (read(server) if is_stream else server.get("/"))
    assert len(str(raised.value)) < 1000
    # What is on the way is in buffers of both sides, and of the system between them.
    assert sent < 2**24 + 2**25


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(status: int) -> None:
    """Neither with a prompt nor with a question about the server; a sentence says where to."""
    paths: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    async with answering(elsewhere) as server:
        for call in (read(server), server.get("/"), server.post("/", {"prompt": "secret"})):
            with pytest.raises(ServerFaultError, match="redirects / to /elsewhere"):
                await call
    assert paths == ["/"] * 3


async def test_nothing_is_unpacked() -> None:
    """Some kilobytes may be gigabytes."""

    async def packed(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        body = gzip.compress(b"{" + b" " * 2**20 + b"}")
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return web.Response(body=body, headers=headers)

    async with answering(packed) as server:
        for call in (read(server), server.get("/")):
            with pytest.raises(
                ServerFaultError, match="in the encoding 'gzip', which was not requested"
            ):
                await call


@pytest.mark.parametrize(
    "silence", [b": ping\n\n", b'data: {"choices": []}\n\n', b'data: {"choices": [%s]}\n\n']
)
@pytest.mark.parametrize("first", [True, False])
async def test_what_brings_no_token_does_not_keep_a_stream_alive(
    silence: bytes, first: bool
) -> None:
    """Comments, events without a choice, and choices without a token."""
    choice = b'{"token_ids": [], "finish_reason": null}'
    silence = silence.replace(b"%s", choice)

    async def frozen(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if first:
            await response.write(
                b'data: {"choices": [{"token_ids": [97], "finish_reason": null}]}\n\n'
            )
        while True:
            await response.write(silence)
            await asyncio.sleep(0.02)

    async with answering(frozen) as server:
        engine = ForwardingEngine(server.url, None, VllmDialect(), limits_of(), DESCRIPTION, 0.3)
        engine.start()
        engine.add(EngineRequest(1, [97], SamplingParams(), 0, 10))
        outputs: list[SequenceOutput] = []
        while not outputs or outputs[-1].given_back is None:
            outputs += [it for step in await engine.fetch() for it in step.outputs]
        await engine.stop(1.0)
    assert [it.token_ids for it in outputs] == [[97], []] if first else [[]]
    assert outputs[-1].given_back is not None
    assert "sent no token for too long" in outputs[-1].given_back.reason


def logprobs_of(logprob: str, **members: str) -> str:
    """The log-probabilities of one token."""
    token_id, rank = members.get("token_id", "97"), members.get("rank", "1")
    top = f'{{"token_id": {token_id}, "logprob": {logprob}, "rank": 1}}'
    chosen = f'"token_id": {token_id}, "logprob": {logprob}, "rank": {rank}'
    return f'{{"content": [{{{chosen}, "top_logprobs": [{top}]}}]}}'


async def test_tokens_that_are_equally_likely_are_cut_to_the_number_that_was_asked_for() -> None:
    """A server gives them one rank, and a hostile one gives it to as many as it likes."""
    many = [{"token_id": number, "logprob": -1.0, "rank": 1} for number in range(200)]
    content = [{"token_id": 97, "logprob": -1.0, "rank": 1, "top_logprobs": many}]
    choice = {"token_ids": [97], "finish_reason": "length", "logprobs": {"content": content}}
    data = json.dumps({"choices": [choice]}).encode()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"data: " + data + b"\n\n")

    request = EngineRequest(1, [97], SamplingParams(logprobs=3), 0, 1)
    async with answering(answer) as server:
        wanted = Continuation(request, [], "m")
        [chunk] = [each async for each in VllmDialect().generate(server, wanted)]
    assert chunk.logprobs is not None
    assert [each.token_id for each in chunk.logprobs[0].top or ()] == [0, 1, 2]


async def test_no_cookie_is_kept() -> None:
    """A server could set another one with each answer, without end."""
    got: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        got.append(request.headers.get("Cookie", ""))
        response = web.json_response({})
        response.set_cookie(f"name{len(got)}", "value")
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    async with (
        TestServer(app, host="localhost") as there,
        talking_to(f"http://localhost:{there.port}") as server,
    ):
        for _ in range(2):
            await server.get("/")
    assert got == ["", ""]


UNUSABLE = {
    "a NaN": ("[97]", logprobs_of("NaN")),
    "an infinity": ("[97]", logprobs_of("Infinity")),
    "a null": ("[97]", logprobs_of("null")),
    "a text": ("[97]", logprobs_of('"x"')),
    "a number beyond floats": ("[97]", logprobs_of("1e999")),
    "the log-probability of a text": ("[97]", logprobs_of("-1.0", token_id='"x"')),
    "a rank that is no number": ("[97]", logprobs_of("-1.0", rank="[]")),
    "none of a token": ("[97]", '{"content": []}'),
    "a token that is a text": ('["a"]', "null"),
    "tokens that are a text": ('"abc"', "null"),
    "a token with a fraction": ("[97.0]", "null"),
    "a truth": ("[true]", "null"),
    "a negative token": ("[-1]", "null"),
    "a token beyond the vocabulary": ("[99999]", "null"),
    "a token beyond 64 bits": (f"[{'9' * 40}]", "null"),
}


@pytest.mark.parametrize("unusable", UNUSABLE)
async def test_an_answer_with_unusable_values_fails_alone(unusable: str) -> None:
    """The request is tried again, as a server may err once; then it ends with an error. The server
    counts as well all the time, so no other request waits."""
    token_ids, logprobs = UNUSABLE[unusable]
    choice = f'{{"token_ids": {token_ids}, "finish_reason": null, "logprobs": {logprobs}}}'
    least = logprobs_of("-Infinity")
    good = f'{{"token_ids": [97], "finish_reason": "length", "logprobs": {least}}}'

    async def answer(request: web.Request) -> web.StreamResponse:
        is_good = (await request.json())["token_ids"] == [98]
        response = web.StreamResponse()
        await response.prepare(request)
        told = good if is_good else choice
        await response.write(f'data: {{"choices": [{told}]}}\n\ndata: [DONE]\n\n'.encode())
        return response

    async with answering(answer) as server:
        engine = ForwardingEngine(server.url, None, VllmDialect(), limits_of(), DESCRIPTION, 60.0)
        engine.start()
        ends: list[SequenceOutput] = []
        for attempt in range(4):
            prompt = [97] if attempt < 3 else [98]
            engine.add(EngineRequest(attempt, prompt, SamplingParams(logprobs=1), 0, 1))
            ends += [it for step in await engine.fetch() for it in step.outputs]
            assert engine.is_accepting
        await engine.stop(1.0)
    assert all(it.given_back is not None and not it.given_back.is_blamed for it in ends[:2])
    assert ends[2].finish_reason is FinishReason.ERROR
    assert str(ends[2].error).startswith("the inference server's answer cannot be used: ")
    assert ends[3].finish_reason is FinishReason.LENGTH
    assert ends[3].logprobs is not None
    assert ends[3].logprobs[0].logprob == LEAST


@pytest.mark.parametrize(
    "wrong", [{"max_model_len": 0}, {"max_num_seqs": -1}, {"kv_tokens": 2**60}, {"model": [1]}]
)
def test_a_server_that_says_nonsense_of_itself_cannot_be_used(wrong: dict[str, Any]) -> None:
    told: dict[str, Any] = {"software": "s", "model": "m", "max_model_len": 1024}
    assert ServerDescription(**told).model == "m"
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServerDescription(**{**told, **wrong})


async def test_a_number_beyond_integers_is_a_fault_of_the_server() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(text='{"data": [{"id": "m", "max_model_len": 1e999}]}')

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    async with TestServer(app) as stranger:
        server = Server(str(stranger.make_url("")).rstrip("/"))
        with pytest.raises(ServerFaultError, match="malformed"), malformed_as_fault():
            await OpenAIDialect().describe(server)
        await server.close()


LONG = "x" * 10_000
MODEL = {"id": "m", "max_model_len": 8}
PROPS = {
    "total_slots": 1,
    "default_generation_settings": {"n_ctx": 8},
    "model_path": "m",
    "build_info": "b",
}
LONG_ANSWERS: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "vLLM's version": (VllmDialect(), {"/version": {"version": LONG}}),
    "vLLM's length": (
        VllmDialect(),
        {"/version": {"version": 1}, "/v1/models": {"data": [{**MODEL, "max_model_len": LONG}]}},
    ),
    "vLLM's model": (
        VllmDialect(),
        {"/version": {"version": 1}, "/v1/models": {"data": [{**MODEL, "id": LONG}]}},
    ),
    "vLLM's root": (
        VllmDialect(),
        {"/version": {"version": 1}, "/v1/models": {"data": [{**MODEL, "root": LONG}]}},
    ),
    "the model of an OpenAI server": (
        OpenAIDialect(),
        {
            "/v1/models": {"data": [{"id": LONG}]},
            "/v1/completions": {"choices": [{"token_ids": [1]}]},
        },
    ),
    "the model of llama.cpp": (LlamaCppDialect(), {"/props": {**PROPS, "model_path": LONG}}),
    "the slots of llama.cpp": (LlamaCppDialect(), {"/props": {**PROPS, "total_slots": LONG}}),
    "an error": (LlamaCppDialect(), {"/props": {"error": {"message": LONG}}}),
}


@pytest.mark.parametrize("what", LONG_ANSWERS)
async def test_a_long_text_of_a_server_is_cut_in_messages(what: str) -> None:
    dialect, answers = LONG_ANSWERS[what]

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(answers.get(request.path, {}))

    async with answering(answer) as server:
        with pytest.raises((ServerFaultError, ConfigurationError)) as caught, malformed_as_fault():
            await dialect.describe(server)
    assert len(str(caught.value)) < 1000


STREAM_ENDS = {
    "an error": {"error": {"message": LONG}},
    "a reason": {"choices": [{"token_ids": [97], "finish_reason": LONG, "text": ""}]},
    "a key": {"choices": {LONG: 1}},
}


@pytest.mark.parametrize("dialect", [VllmDialect(), OpenAIDialect(), LlamaCppDialect()])
@pytest.mark.parametrize("what", STREAM_ENDS)
async def test_so_it_is_in_a_stream(dialect: Dialect, what: str) -> None:
    event = {"tokens": [97], "tokens_predicted": 1, "stop": True, "stop_type": LONG}
    data = json.dumps({**event, **STREAM_ENDS[what]}).encode()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"data: " + data + b"\n\n")

    request = EngineRequest(1, [97], SamplingParams(temperature=0.0), 0, 1)
    async with answering(answer) as server:
        with pytest.raises(ServerFaultError) as caught, malformed_as_fault():
            async for _ in dialect.generate(server, Continuation(request, [], "m")):
                pass
    assert len(str(caught.value)) < 1000


def test_what_a_server_says_of_itself_is_cut_in_messages() -> None:
    description = ServerDescription("vLLM", "x" * 4000, max_model_len=8)
    found = FoundServer("http://a", description, probe_token_ids=[1])
    with pytest.raises(ConfigurationError) as caught:
        found.check_tokenizer(HuggingFaceTokenizer.load(str(MODEL_DIR)))
    assert len(str(caught.value)) < 1000


async def test_a_line_in_many_pieces_is_put_together_once() -> None:
    """Such a line is as fast as the same bytes in many lines, up to a small factor."""

    async def seconds_of(data: bytes) -> tuple[float, list[bytes]]:
        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(data), 8):
                yield data[at : at + 8]

        before = time.thread_time()
        content: Any = SimpleNamespace(content=SimpleNamespace(iter_any=pieces))
        found = [event async for event in _events(content)]
        return time.thread_time() - before, found

    text = b"y" * 2**19
    one, [event] = await seconds_of(b"data: " + text + b"\n")
    many, events = await seconds_of(b"data: yyyyyyyyy\n" * 2**15)
    assert event == text
    assert events == [b"y" * 9] * 2**15
    assert one < 5 * many
