"""Streams of servers that behave as no real one does, passed on by the engine itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest, SequenceOutput
from promptq.worker.upstream.dialects.dialect import Chunk, Continuation, ServerDescription
from promptq.worker.upstream.dialects.transport import Server, ServerFaultError
from promptq.worker.upstream.dialects.vllm import VllmDialect
from promptq.worker.upstream.forwarding_engine import ForwardingEngine
from tests.programs.stand_in_server.starting import DESCRIPTION, limits_of
from tests.support.waiting import async_until

Script = Callable[[EngineRequest], AsyncGenerator[Chunk]]


class Scripted(VllmDialect):
    """A server whose streams are written in a test. It is never called."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
        return self._script(wanted.request)


@asynccontextmanager
async def running(script: Script) -> AsyncIterator[ForwardingEngine]:
    limits = limits_of(max_model_len=8192)
    engine = ForwardingEngine(
        "http://127.0.0.1:1", None, Scripted(script), limits, DESCRIPTION, 60.0
    )
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop(1.0)


def request(sequence_id: int, max_tokens: int) -> EngineRequest:
    return EngineRequest(sequence_id, [97], SamplingParams(), 0, max_tokens)


async def test_a_stream_that_goes_on_after_its_length_is_closed() -> None:
    async def endless(_: EngineRequest) -> AsyncGenerator[Chunk]:
        while True:
            yield Chunk([97, 98])
            await asyncio.sleep(0)

    async with running(endless) as engine:
        engine.add(request(1, 5))
        tokens, reason = [], None
        while reason is None:
            for step in await engine.fetch():
                for output in step.outputs:
                    tokens += output.token_ids
                    reason = output.finish_reason
        assert (tokens, reason) == ([97, 98, 97, 98, 97], FinishReason.LENGTH)
        await async_until(lambda: not engine.num_aborting)


async def test_tokens_that_are_aborted_before_they_are_fetched_hold_nobody_back() -> None:
    is_full, is_held_back = asyncio.Event(), asyncio.Event()

    async def script(it: EngineRequest) -> AsyncGenerator[Chunk]:
        if it.sequence_id == 1:
            yield Chunk([97] * 5000)
        await is_full.wait()
        is_held_back.set()
        yield Chunk([])
        yield Chunk([98])

    async with running(script) as engine:
        engine.add(request(1, 6000))
        engine.add(request(2, 1))
        await async_until(lambda: engine.stats.generation_tokens == 5000)
        is_full.set()
        await is_held_back.wait()
        await asyncio.sleep(0)
        engine.abort(1)
        [step] = await engine.fetch()
        assert [(it.sequence_id, it.token_ids) for it in step.outputs] == [(2, [98])]


async def test_each_call_of_a_choice_has_the_whole_idle_time() -> None:
    """Together the calls take longer."""

    class Slow(VllmDialect):
        """Prefers the token 97, and then 98. Both are forbidden."""

        async def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
            await asyncio.sleep(1.2)
            yield Chunk([97 if wanted.mask is None else 97 + len(wanted.mask.rejected)])

    engine = ForwardingEngine("http://127.0.0.1:1", None, Slow(), limits_of(), DESCRIPTION, 2.4)
    engine.start()
    engine.add(replace(request(1, 1), bad_token_sequences=((97,), (98,))))
    outputs: list[SequenceOutput] = []
    while not outputs:
        outputs = [output for step in await engine.fetch() for output in step.outputs]
    await engine.stop(1.0)
    assert (outputs[0].token_ids, outputs[0].finish_reason) == ([99], FinishReason.LENGTH)


async def test_streams_use_the_abilities_that_a_server_has_after_a_fault() -> None:
    seeds = list[int]()

    async def broken(asked: EngineRequest) -> AsyncGenerator[Chunk]:
        seeds.append(asked.seed)
        raise ServerFaultError("it breaks off")
        yield

    async def look(server: Server, seconds: float) -> ServerDescription:
        return replace(DESCRIPTION, keeps_seeds=True)

    async with running(broken) as engine:
        engine._recovery.wait_until_well = look  # type: ignore[method-assign]
        engine.add(replace(request(1, 5), output_token_ids=[97]))
        await async_until(lambda: len(seeds) == 1 and engine.is_accepting)
        engine.add(replace(request(2, 5), output_token_ids=[97]))
        await async_until(lambda: len(seeds) == 2)
        assert seeds[0] != request(1, 5).seed == seeds[1]
        assert "temperature" not in engine.abilities.inexact_with
