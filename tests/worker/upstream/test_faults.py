"""A server that fails, is slow or is away: nothing is lost, repeated, changed or blamed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import RequestState
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.upstream.connecting import DIALECTS
from promptq.worker.upstream.dialects.vllm import VllmDialect
from tests.programs.stand_in_server.starting import (
    StandIn,
    limits_of,
    served_upstream,
    stand_in_server,
    text_after,
)
from tests.support.model_free import finished, running_worker
from tests.support.requests import async_put, until_tokens
from tests.support.servers import free_port
from tests.support.waiting import async_until

GREEDY: dict[str, Any] = {"temperature": 0.0}
SLOWLY = ("--token-seconds", "0.015")
"""So that a fault finds streams that run."""


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with stand_in_server("vllm", *SLOWLY) as server:
        yield server


async def put_some(queue: AsyncRequestQueue, count: int, max_tokens: int = 60) -> dict[str, str]:
    """Greedy requests: what each must answer, by id."""
    prompts = [f"prompt {number}" for number in range(count)]
    ids = [await async_put(queue, prompt=it, max_tokens=max_tokens, **GREEDY) for it in prompts]
    return {
        request_id: text_after(prompt, max_tokens)
        for request_id, prompt in zip(ids, prompts, strict=True)
    }


async def assert_whole_texts(
    queue: AsyncRequestQueue, wanted: dict[str, str]
) -> list[dict[str, str]]:
    """Returns the records of the requests, each with its whole text and no crash."""
    records = []
    for request_id, text in wanted.items():
        result = await finished(queue, request_id)
        assert (result["finish_reason"], result["text"]) == ("length", text)
        record = await queue.run(lookups.record(queue.keys, request_id))
        assert int(record.get("crashes") or 0) == 0, "nobody blames a request for its server"
        records.append(record)
    return records


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("vllm", it) for it in ("break", "abort", "end", "malformed", "foreign")),
        *(("sglang", it) for it in ("break", "abort", "end", "malformed", "foreign")),
        ("llama.cpp", "break"),
    ],
)
async def test_streams_that_the_server_breaks_off_go_on(
    redis_url: str, queue: AsyncRequestQueue, name: str, fault: str
) -> None:
    dialect = DIALECTS[name](is_exact=True)
    with stand_in_server(name, *SLOWLY) as stand_in:
        async with running_worker(redis_url, served_upstream(stand_in.url, dialect)):
            wanted = await put_some(queue, 8, 300)
            await until_tokens(queue, next(iter(wanted)), 5)
            stand_in.fail(fault)
            records = await assert_whole_texts(queue, wanted)
        assert stand_in.told()["running"] == 0
    assert any(int(record["attempt"]) > 1 for record in records), "some were broken off"


async def test_a_frozen_server_is_noticed_although_it_is_healthy(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn
) -> None:
    served = served_upstream(stand_in.url, idle_seconds=0.5)
    async with running_worker(redis_url, served) as worker:
        wanted = await put_some(queue, 3)
        await until_tokens(queue, next(iter(wanted)), 5)
        stand_in.fail("freeze")
        await async_until(lambda: not worker.leases.num_running)
        await async_until(lambda: worker.heartbeat.stats().state == "no_server")
        late = await async_put(queue, prompt="late", max_tokens=5, **GREEDY)
        await asyncio.sleep(1.5)  # it polls each second
        assert await queue.state(late) is RequestState.WAITING, "nothing is claimed meanwhile"
        stand_in.fail("")
        await assert_whole_texts(queue, wanted | {late: text_after("late", 5)})
    assert stand_in.told()["running"] == 0


async def test_a_server_that_is_overloaded_gets_the_requests_later(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn
) -> None:
    stand_in.fail("overload")
    async with running_worker(redis_url, served_upstream(stand_in.url)) as worker:
        wanted = await put_some(queue, 3, 10)
        await async_until(lambda: worker.heartbeat.stats().state == "no_server")
        stand_in.fail("")
        await assert_whole_texts(queue, wanted)


async def test_a_server_may_be_killed_and_come_back(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    port = free_port()
    with ExitStack() as servers:
        stand_in = servers.enter_context(stand_in_server("vllm", *SLOWLY, port=port))
        async with running_worker(redis_url, served_upstream(stand_in.url)) as worker:
            wanted = await put_some(queue, 64)
            await until_tokens(queue, next(iter(wanted)), 5)
            os.kill(stand_in.pid, signal.SIGKILL)
            await async_until(lambda: worker.heartbeat.stats().state == "no_server")
            again = await asyncio.to_thread(
                servers.enter_context, stand_in_server("vllm", *SLOWLY, port=port)
            )
            await assert_whole_texts(queue, wanted)
            assert worker.heartbeat.stats().state == "running"
        assert again.told()["running"] == 0


async def test_a_server_that_comes_back_with_less_room_ends_the_worker_and_no_request(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn
) -> None:
    served = served_upstream(stand_in.url, limits=limits_of(max_model_len=2048))
    wanted = await put_some(queue, 2, 300)

    async def break_off() -> None:
        async with running_worker(redis_url, served) as worker:
            await until_tokens(queue, next(iter(wanted)), 5)
            stand_in.fail("break")
            await async_until(lambda: worker.engine.has_failed)

    with pytest.raises(ConfigurationError, match="takes 1024 tokens now, and took 2048 before"):
        await break_off()
    async with running_worker(redis_url, served_upstream(stand_in.url)):
        await assert_whole_texts(queue, wanted)


async def test_a_stream_moves_to_a_worker_whose_server_lives(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn
) -> None:
    with stand_in_server("vllm", *SLOWLY) as other:
        async with running_worker(redis_url, served_upstream(stand_in.url)):
            wanted = await put_some(queue, 4, 200)
            await until_tokens(queue, next(iter(wanted)), 5)
            async with running_worker(redis_url, served_upstream(other.url)):
                os.kill(stand_in.pid, signal.SIGKILL)
                await assert_whole_texts(queue, wanted)
        assert other.told()["ended"] == 4


async def test_what_breaks_every_server_becomes_a_dead_letter(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn
) -> None:
    """Else it would keep breaking them for ever."""
    async with running_worker(redis_url, served_upstream(stand_in.url), max_crashes=2):
        poison = await async_put(queue, prompt="poison!", max_tokens=50, **GREEDY)
        assert (await finished(queue, poison))["error"]["type"] == "dead_letter"
        await assert_whole_texts(queue, await put_some(queue, 2, 10))


async def test_a_cancel_ends_the_stream_at_the_server(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, served_upstream(stand_in.url)):
        request_id = await async_put(queue, prompt="long", max_tokens=900, **GREEDY)
        await until_tokens(queue, request_id, 5)
        await queue.cancel(request_id)
        assert (await finished(queue, request_id))["finish_reason"] == "cancelled"
        await async_until(lambda: not stand_in.told()["running"])
    assert stand_in.told()["broken_off"] == 1


async def test_a_server_has_no_more_than_its_slots_and_urgent_ones_come_first(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn
) -> None:
    served = served_upstream(stand_in.url, limits=limits_of(max_num_seqs=2))
    async with running_worker(redis_url, served):
        slow = await put_some(queue, 6, 150)
        await until_tokens(queue, next(iter(slow)), 5)
        urgent = await async_put(queue, prompt="now", max_tokens=5, priority=-5, **GREEDY)
        await assert_whole_texts(queue, {urgent: text_after("now", 5)})
        states = [await queue.state(it) for it in slow]
        assert RequestState.COMPLETED not in states, "it did not wait for a slot"
        await assert_whole_texts(queue, slow)
    assert stand_in.told()["most_running"] == 2


async def test_a_refusal_of_one_request_ends_that_request_alone(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn
) -> None:
    limits = replace(limits_of(), vocab_size=1000)  # more than the server knows of
    async with running_worker(redis_url, served_upstream(stand_in.url, limits=limits)):
        bad = await async_put(queue, prompt=[999], max_tokens=5, **GREEDY)
        wanted = await put_some(queue, 2, 20)
        result = await finished(queue, bad)
        assert result["finish_reason"] == "error"
        assert "Token id 999 is out of vocabulary" in result["error"]["message"]
        await assert_whole_texts(queue, wanted)


async def test_a_temperature_that_the_server_would_raise_is_refused_or_corrected(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, served_upstream(stand_in.url)):
        fields: dict[str, Any] = {"prompt": "a", "max_tokens": 5, "temperature": 0.005}
        error = (await finished(queue, await async_put(queue, **fields, top_p=0.9)))["error"]
        assert error["type"] == "unsupported"
        assert error["message"].startswith("temperature: this worker's engine takes 0, or 0.01")
        result = await finished(queue, await async_put(queue, **fields))
        assert len(result["token_ids"]) == 5, "the worker corrects the draws"


@pytest.mark.parametrize(
    ("fields", "is_resumed"),
    [
        ({"temperature": 0.0, "resume": "exact_only"}, True),
        ({"temperature": 1.0, "seed": 3}, True),
        ({"temperature": 1.0, "seed": 3, "resume": "exact_only"}, False),
    ],
)
async def test_a_stream_that_cannot_go_on_exactly_says_so(
    redis_url: str,
    queue: AsyncRequestQueue,
    stand_in: StandIn,
    fields: dict[str, Any],
    is_resumed: bool,
) -> None:
    async with running_worker(redis_url, served_upstream(stand_in.url)):
        request_id = await async_put(queue, prompt="a", max_tokens=60, **fields)
        await until_tokens(queue, request_id, 5)
        stand_in.fail("break")
        result = await finished(queue, request_id)
    if is_resumed:
        assert len(result["token_ids"]) == 60, "no gap and no repeat"
        assert result["stats"]["resumed_inexactly"] is (fields["temperature"] > 0)
    else:
        assert result["error"]["type"] == "cannot_resume"
        assert result["error"]["message"].startswith("temperature: ")
        assert len(result["token_ids"]) >= 5, "what was sent stays"


async def test_an_engine_that_is_never_exact_says_so_too(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn
) -> None:
    served = served_upstream(stand_in.url, VllmDialect(is_exact=False))
    async with running_worker(redis_url, served):
        request_id = await async_put(
            queue, prompt="a", max_tokens=60, resume="exact_only", **GREEDY
        )
        await until_tokens(queue, request_id, 5)
        stand_in.fail("break")
        result = await finished(queue, request_id)
    assert result["error"]["type"] == "cannot_resume"


async def test_a_penalty_asks_llama_cpp_for_no_more_memory_than_there_are_tokens(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    with stand_in_server("llama.cpp") as stand_in:
        served = served_upstream(stand_in.url, DIALECTS["llama.cpp"](is_exact=True))
        async with running_worker(redis_url, served):
            request_id = await async_put(
                queue, prompt="a", max_tokens=9, repetition_penalty=1.1, **GREEDY
            )
            assert (await finished(queue, request_id))["finish_reason"] == "length"
