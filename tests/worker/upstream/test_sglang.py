"""SGLang stops at its own end tokens, and takes any number of biases."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.upstream.dialects.dialect import (
    BANNED,
    Chunk,
    Continuation,
    Mask,
    ServerDescription,
)
from promptq.worker.upstream.dialects.sglang import SglangDialect
from promptq.worker.upstream.dialects.transport import (
    OverloadedError,
    RefusedError,
    Server,
    ServerFaultError,
)
from promptq.worker.upstream.watched_stream import WatchedStream
from tests.worker.upstream.test_server import answering

ENDS = frozenset({9})


def event(*token_ids: int, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"token_ids": token_ids, "finish_reason": reason}]}


@asynccontextmanager
async def scripted(*calls: list[dict[str, Any]]) -> AsyncIterator[tuple[Server, list[Any]]]:
    """A server that answers each call with the next events, and the bodies that it gets."""
    bodies: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        said = calls[len(bodies) - 1]
        return web.Response(text="".join(f"data: {json.dumps(each)}\n\n" for each in said))

    async with answering(answer) as server:
        yield server, bodies


async def chunks(server: Server, *, mask: Mask | None = None, **params: Any) -> list[Chunk]:
    request = EngineRequest(1, [1, 2], SamplingParams(**params), 0, 5, end_token_ids=ENDS)
    wanted = Continuation(request, [3], "m", mask)
    return [each async for each in SglangDialect().generate(server, wanted)]


async def watched(server: Server, request: EngineRequest) -> list[int]:
    description = ServerDescription("SGLang", "m", 1024)
    stream = WatchedStream(SglangDialect(), server, request, [3], description, 256)
    return [token_id async for chunk in stream.chunks() for token_id in chunk.token_ids]


@pytest.mark.parametrize("penalty", [0.0, 0.5])
async def test_an_end_token_that_the_request_ignores_ends_no_stream(penalty: float) -> None:
    """A further call counts the penalties of all tokens."""
    params = SamplingParams(frequency_penalty=penalty)
    request = EngineRequest(1, [1, 2], params, 0, 5, end_token_ids=ENDS)
    first = [event(4), event(5, reason="stop")]
    async with scripted(first, [event(9, reason="stop")]) as (server, bodies):
        assert await watched(server, request) == [4, 5, 9]
    assert [body["prompt"] for body in bodies] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert [body["max_tokens"] for body in bodies] == [4, 2]
    biases = {"3": -penalty}, {"3": -penalty, "4": -penalty, "5": -penalty}
    assert [body["logit_bias"] for body in bodies] == ([*biases] if penalty else [None, None])


@pytest.mark.parametrize(("ends", "ignores"), [(ENDS, False), (frozenset[int](), True)])
async def test_the_server_ignores_end_tokens_only_if_the_request_has_none(
    ends: frozenset[int], ignores: bool
) -> None:
    request = EngineRequest(1, [1], SamplingParams(), 0, 2, end_token_ids=ends)
    async with scripted([event(4, reason="length")]) as (server, bodies):
        await watched(server, request)
    assert (bodies[0]["ignore_eos"], bodies[0]["stop_token_ids"]) == (ignores, [*ends])


@pytest.mark.parametrize(
    ("code", "raised"),
    [(503, OverloadedError), (400, RefusedError), (500, ServerFaultError), ("x", ServerFaultError)],
)
async def test_an_error_inside_of_a_stream_counts_as_its_status(
    code: Any, raised: type[Exception]
) -> None:
    async with scripted([{"error": {"message": "no room", "code": code}}]) as (server, _):
        with pytest.raises(raised, match="no room"):
            await chunks(server)


@pytest.mark.parametrize(
    ("num_allowed", "takes_grammars"), [(2000, True), (2000, False), (5, True)]
)
async def test_a_mask_is_a_grammar_or_a_ban_of_all_other_tokens(
    num_allowed: int, takes_grammars: bool
) -> None:
    allowed = np.zeros(4096, bool)
    allowed[:num_allowed] = True
    mask = Mask(allowed, (4000,), may_be_grammar=takes_grammars)
    async with scripted([event(4, reason="length")]) as (server, bodies):
        await chunks(server, mask=mask, logit_bias={"1": 2.0, "4000": 7.0})
    (body,) = bodies
    assert body["max_tokens"] == 1
    if num_allowed > 1024 and takes_grammars:
        assert body["ebnf"] == mask.grammar
        return
    assert "ebnf" not in body
    banned = {name for name, by in body["logit_bias"].items() if by == BANNED}
    assert banned == {str(token_id) for token_id in range(num_allowed, 4096)}
    assert body["logit_bias"]["1"] == 2.0


async def test_a_prompt_of_zeros_is_sent_as_a_list_of_prompts() -> None:
    """SGLang takes zeros for the beginnings of empty prompts."""
    end = [event(0, reason="length")]
    async with scripted(end, end) as (server, bodies):
        for prompt in ([0, 0], [0, 1]):
            request = EngineRequest(1, prompt, SamplingParams(), 0, 1)
            async for _ in SglangDialect().generate(server, Continuation(request, [], "m")):
                pass
    assert [body["prompt"] for body in bodies] == [[[0, 0]], [0, 1]]
