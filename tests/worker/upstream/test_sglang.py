"""SGLang stops at its own end tokens, and takes any number of biases."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.upstream.dialects.dialect import BANNED, Chunk, Mask
from promptq.worker.upstream.dialects.sglang import SglangDialect
from promptq.worker.upstream.dialects.transport import (
    OverloadedError,
    RefusedError,
    Server,
    ServerFaultError,
)
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
    return [each async for each in SglangDialect().generate(server, request, [3], "m", mask)]


async def test_an_end_token_that_the_request_ignores_ends_no_stream() -> None:
    first = [event(4), event(5, reason="stop")]
    async with scripted(first, [event(9, reason="stop")]) as (server, bodies):
        found = await chunks(server)
    assert [chunk.token_ids for chunk in found] == [[4], [5], [9]]
    assert [chunk.finish_reason for chunk in found] == [None, None, FinishReason.STOP]
    assert [body["prompt"] for body in bodies] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert [body["max_tokens"] for body in bodies] == [4, 2]


@pytest.mark.parametrize(
    ("params", "ignores"), [({}, False), ({"presence_penalty": 0.5}, True), ({"top_k": 5}, False)]
)
async def test_only_the_worker_ends_a_stream_whose_penalties_another_call_would_not_count(
    params: dict[str, Any], ignores: bool
) -> None:
    async with scripted([event(4, reason="length")]) as (server, bodies):
        await chunks(server, **params)
    assert (bodies[0]["ignore_eos"], bodies[0]["stop_token_ids"]) == (ignores, [9])


@pytest.mark.parametrize("first", [[], [event(reason="stop")], [event(4)]])
async def test_a_stream_without_its_end_is_a_fault(first: list[dict[str, Any]]) -> None:
    """Also an end without a token: another call might get this end again, for ever."""
    async with scripted(first) as (server, _):
        with pytest.raises(ServerFaultError, match="without a finish reason"):
            await chunks(server)


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
            async for _ in SglangDialect().generate(server, request, [], "m"):
                pass
    assert [body["prompt"] for body in bodies] == [[[0, 0]], [0, 1]]
