"""Workers leave room on a server for its other clients, and use the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web

from promptq.shared.protocol.request import RequestState, SamplingParams
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.serve.worker import Worker
from promptq.worker.upstream import gate
from promptq.worker.upstream.connecting import DIALECTS
from promptq.worker.upstream.dialects.dialect import Chunk, Continuation
from promptq.worker.upstream.dialects.transport import Server, ServerFaultError
from promptq.worker.upstream.forwarded_sequence import ForwardedSequence
from promptq.worker.upstream.server_load import ServerLoad, read_load
from tests.programs.stand_in_server.starting import (
    StandIn,
    limits_of,
    served_upstream,
    stand_in_server,
)
from tests.support.model_free import running_worker
from tests.support.requests import async_put
from tests.support.waiting import async_until
from tests.worker.upstream.test_faults import assert_whole_texts, put_some
from tests.worker.upstream.test_forwarding_engine import request, running

SLOTS = 8
SLOWLY = ("--max-num-seqs", str(SLOTS), "--token-seconds", "0.005")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate reads the load more often, so that tests are short."""
    monkeypatch.setattr(gate, "_INTERVAL_SECONDS", 0.05)


@pytest.fixture(params=["vllm", "llama.cpp", "sglang"])
def stand_in(request: pytest.FixtureRequest) -> Iterator[tuple[str, StandIn]]:
    with stand_in_server(request.param, *SLOWLY) as server:
        yield request.param, server


def sharing(redis_url: str, name: str, url: str, slots: int = SLOTS) -> Any:
    dialect = DIALECTS[name](is_exact=True)
    return running_worker(redis_url, served_upstream(url, dialect, limits=limits_of(slots)))


async def call(name: str, url: str, num_tokens: int, num_prompt: int = 3) -> None:
    """Reads an answer straight from the server, as its other clients do."""
    params = SamplingParams(temperature=0.0)
    request = EngineRequest(0, [97] * num_prompt, params, 0, num_tokens)
    server = Server(url)
    try:
        wanted = Continuation(request, [], "m")
        async with aclosing(DIALECTS[name]().generate(server, wanted)) as chunks:
            async for _ in chunks:
                pass
    finally:
        await server.close()


@asynccontextmanager
async def callers(count: int, *args: Any) -> AsyncIterator[None]:
    """Clients that always have a request at the server."""

    async def again_and_again() -> None:
        while True:
            await call(*args)

    tasks = [asyncio.create_task(again_and_again()) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def keep_full(queue: AsyncRequestQueue) -> None:
    """Always leaves some requests in the queue."""
    while True:
        if await queue.run(lookups.count(queue.keys)) < 20:
            await put_some(queue, 20, 30)
        await asyncio.sleep(0.05)


@asynccontextmanager
async def endless_queue(queue: AsyncRequestQueue) -> AsyncIterator[None]:
    task = asyncio.create_task(keep_full(queue))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def shares(worker: Worker) -> None:
    """Waits until the worker leaves room, and has no more streams than it allows itself."""
    limit = 0

    def is_lowered() -> bool:
        nonlocal limit
        limit = worker.engine.stats.max_running or SLOTS
        return limit < SLOTS and worker.engine.stats.num_running <= limit

    await async_until(is_lowered)


@pytest.mark.matrix(1)
async def test_other_clients_find_room_once_one_had_to_wait(
    redis_url: str, queue: AsyncRequestQueue, stand_in: tuple[str, StandIn]
) -> None:
    name, server = stand_in
    async with endless_queue(queue), sharing(redis_url, name, server.url) as worker:
        await async_until(lambda: server.told()["running"] == SLOTS)
        assert not worker.heartbeat.stats().holds_back, "alone, it uses all slots"
        async with callers(1, name, server.url, 100):
            await shares(worker)
        await async_until(lambda: (worker.engine.stats.max_running or SLOTS) > 1)
        waited = server.told()["waited"]
        for _ in range(20):
            await call(name, server.url, 5)
        assert server.told()["waited"] == waited
        await async_until(lambda: worker.engine.stats.num_running > SLOTS // 2)  # the rest
        assert "at most" in worker.heartbeat.stats().holds_back


async def test_a_worker_uses_all_slots_again_when_no_other_client_has_waited_for_long(
    redis_url: str, queue: AsyncRequestQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in_server("vllm", *SLOWLY) as server:
        async with endless_queue(queue), sharing(redis_url, "vllm", server.url) as worker:
            await async_until(lambda: server.told()["running"] == SLOTS)
            async with callers(1, "vllm", server.url, 100):
                await shares(worker)
            for _ in range(20):
                await call("vllm", server.url, 5)
            assert "at most" in worker.heartbeat.stats().holds_back
            monkeypatch.setattr(gate, "_FORGET_SECONDS", 0.0)
            await async_until(lambda: server.told()["running"] == SLOTS)
            assert not worker.heartbeat.stats().holds_back


@pytest.mark.matrix(1)
async def test_a_worker_alone_never_holds_back(
    redis_url: str, queue: AsyncRequestQueue, stand_in: tuple[str, StandIn]
) -> None:
    """Its requests may wait at the server, since it has more slots than that."""
    name, server = stand_in
    async with sharing(redis_url, name, server.url, 3 * SLOTS) as worker:
        wanted = [await put_some(queue, 40, number) for number in (3, 30, 1, 17)]
        seen = set[str]()
        while await queue.run(lookups.count(queue.keys)) or worker.leases.num_running:
            seen.add(worker.heartbeat.stats().holds_back)
            await asyncio.sleep(0.01)
        for some in wanted:
            await assert_whole_texts(queue, some)
    assert server.told()["waited"], "the server was full"
    assert seen == {""}


async def test_an_idle_worker_tries_with_one_request(
    redis_url: str, queue: AsyncRequestQueue, stand_in: tuple[str, StandIn]
) -> None:
    name, server = stand_in
    async with callers(2 * SLOTS, name, server.url, 20):
        await async_until(lambda: server.told()["waiting"] > 2)
        async with sharing(redis_url, name, server.url) as worker:
            await async_until(lambda: "other clients wait" in worker.heartbeat.stats().holds_back)
            wanted = await put_some(queue, 6, 5)
            most = 0
            while await queue.run(lookups.count(queue.keys)) or worker.leases.num_running:
                most = max(most, worker.leases.num_running)
                await asyncio.sleep(0.005)
            assert most == 1
            await assert_whole_texts(queue, wanted)


async def test_a_full_kv_cache_closes_the_gate_until_there_is_room(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    options = (*SLOWLY, "--kv-tokens", "900", "--max-model-len", "5000")
    with stand_in_server("vllm", *options) as server:
        async with sharing(redis_url, "vllm", server.url) as worker:
            async with callers(1, "vllm", server.url, 4000, 850):
                await async_until(
                    lambda: worker.heartbeat.stats().holds_back.endswith("at most 1 streams")
                )
                assert "% full" in worker.heartbeat.stats().holds_back
                await assert_whole_texts(queue, await put_some(queue, 6, 10))
                # The other client, one probe, and one more after a report older than the probe.
                assert server.told()["most_running"] in (2, 3)
            await async_until(lambda: not worker.heartbeat.stats().holds_back)
            await assert_whole_texts(queue, await put_some(queue, 20, 10))
            assert server.told()["most_running"] > 3


async def test_refusals_lower_the_limit_to_the_number_that_the_server_takes(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Without the gate, each round of 16 requests would have 13 refusals."""
    options = (*SLOWLY, "--without-metrics", "--most-at-once", "3")
    with stand_in_server("llama.cpp", *options) as server:
        async with sharing(redis_url, "llama.cpp", server.url, 16) as worker:
            await assert_whole_texts(queue, await put_some(queue, 40, 10))
            assert worker.engine.stats.max_running in (1, 2, 3)
        assert server.told()["refused"] < 40


@pytest.mark.matrix(1)
async def test_several_workers_share_a_server_without_upstream_share(
    redis_url: str, queue: AsyncRequestQueue, stand_in: tuple[str, StandIn]
) -> None:
    name, server = stand_in
    async with endless_queue(queue), AsyncExitStack() as stack:
        both = [
            await stack.enter_async_context(sharing(redis_url, name, server.url)) for _ in range(2)
        ]

        def fit() -> bool:
            running = [worker.engine.stats.num_running for worker in both]
            return min(running) > 0 and sum(running) <= SLOTS and not server.told()["waiting"]

        await async_until(lambda: server.told()["waited"])  # until then both only add streams
        await async_until(fit)
        counts = [worker.engine.stats.num_processed for worker in both]
        before = server.told()

        def shares() -> list[int]:
            return [
                worker.engine.stats.num_processed - count
                for worker, count in zip(both, counts, strict=True)
            ]

        await async_until(lambda: sum(shares()) > 60)
        assert min(shares()) > 5, "both go on"
        after = server.told()
        num_waited, num_started = (after[key] - before[key] for key in ("waited", "started"))
        assert num_waited < num_started / 2


async def test_waiting_requests_return_to_the_queue_when_the_gate_closes(
    redis_url: str, queue: AsyncRequestQueue, stand_in: tuple[str, StandIn]
) -> None:
    """Another worker may have room for them."""
    name, server = stand_in
    async with sharing(redis_url, name, server.url) as worker:
        ids = [
            await async_put(queue, prompt=f"a {number}", max_tokens=900, temperature=0.0)
            for number in range(12)
        ]

        async def is_waiting(request_id: str) -> bool:
            return await queue.state(request_id) is RequestState.WAITING

        await async_until(lambda: worker.engine.stats.num_waiting > 0)
        assert not await is_waiting(ids[SLOTS])
        async with callers(1, name, server.url, 5):
            await async_until(lambda: is_waiting(ids[SLOTS]))
            assert worker.heartbeat.stats().holds_back
        for request_id in ids:
            await queue.cancel(request_id)


async def test_an_engine_starts_no_more_streams_than_the_gate_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker may have prepared more before the gate closed."""

    async def endless(_: EngineRequest) -> AsyncGenerator[Chunk]:
        while True:
            await asyncio.sleep(0.01)
            yield Chunk([97])

    monkeypatch.setattr(gate.Gate, "limit", 2)
    async with running(endless) as engine:
        for number in range(4):
            engine.add(request(number, 5000))
        await async_until(lambda: engine.stats.generation_tokens > 4)
        assert engine.stats.num_running == 2


class TestFall:
    """Each fall keeps the same part of a worker's streams, so large workers give up more."""

    @staticmethod
    async def limits(streams: int, others: int, waiting: int, readings: int) -> list[int]:
        """Returns the limits after successive readings of a server's load. The worker has as many
        streams as it may, the `others` run, and `waiting` of other clients wait."""
        of_worker = [ForwardedSequence(request(number, 9), []) for number in range(streams)]
        for each in of_worker:
            each.timing.first_token_at = 0.0
        the_gate, found, is_over = gate.Gate(streams), list[int](), asyncio.Event()

        def running() -> list[ForwardedSequence]:
            return of_worker[: the_gate.limit]

        def metrics() -> str:
            num_running = others + len(running())
            return f"vllm:num_requests_running {num_running}\nvllm:num_requests_waiting {waiting}\n"

        def heed() -> None:
            found.append(the_gate.limit)
            if len(found) == readings:
                is_over.set()

        async with TestLoad.server(metrics=metrics) as server:
            watching = asyncio.create_task(the_gate.watch(server, running, heed))
            await is_over.wait()
            watching.cancel()
        return found

    async def test_all_workers_keep_the_same_part(self) -> None:
        """Both see 64 streams on a server and 16 that wait."""
        (large,) = await self.limits(48, 16, 16, 1)
        (small,) = await self.limits(16, 48, 16, 1)
        assert 0.55 < small / 16 <= 0.6
        assert 0.55 < large / 48 <= 0.6

    async def test_one_that_waits_costs_little(self) -> None:
        (limit,) = await self.limits(64, 0, 1, 1)
        assert 0.9 * 64 < limit < 64
        (limit,) = await self.limits(8, 0, 1, 1)
        assert limit == 6

    async def test_falls_end_at_one_stream(self) -> None:
        """An idle worker could otherwise never try whether there is room."""
        limits = await self.limits(64, 64, 32, 16)
        assert limits == sorted(limits, reverse=True)
        assert all(after <= 0.8 * before for before, after in pairwise(limits[:4]))
        assert limits[-1] == 1

    def test_each_refusal_keeps_three_quarters(self) -> None:
        the_gate, limits = gate.Gate(64), [64]
        for _ in range(20):
            the_gate.overloaded(the_gate.limit)
            limits.append(the_gate.limit)
        assert limits[:4] == [64, 48, 36, 27]
        assert limits[-1] == 1


class TestLoad:
    """A server's report of its load, as far as it can be read."""

    @staticmethod
    @asynccontextmanager
    async def server(**pages: str | Callable[[], str]) -> AsyncIterator[Server]:
        """Serves these pages, and 501 in place of others as llama.cpp does."""

        async def answer(request: web.Request) -> web.Response:
            page = pages.get(request.path[1:])
            text = page() if callable(page) else page
            if text is None:
                return web.json_response({"error": {"message": "not here"}}, status=501)
            kind = "application/json" if text.startswith("[") else "text/plain"
            return web.Response(text=text, content_type=kind)

        app = web.Application()
        app.router.add_get("/{tail:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server = Server(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            yield server
        finally:
            await server.close()
            await runner.cleanup()

    async def test_all_engines_of_a_server_count(self) -> None:
        metrics = """\
# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 6.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 5.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 1e0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""
        async with self.server(metrics=metrics) as server:
            assert await read_load(server) == ServerLoad(5.0, 2.0, 0.5)

    @pytest.mark.parametrize(
        ("pages", "load"),
        [
            ({"metrics": "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"}, (1, 2)),
            ({"metrics": "llamacpp:requests_processing 4\n"}, (4,)),
            ({"metrics": "sglang:num_running_reqs 3\nsglang:token_usage 0.7\n"}, (3, 0, 0.7)),
            ({"slots": '[{"is_processing": true}, {"is_processing": false}]'}, (1, 0, 0.5)),
        ],
    )
    async def test_kinds_of_reports(self, pages: dict[str, str], load: tuple[float, ...]) -> None:
        async with self.server(**pages) as server:
            assert await read_load(server) == ServerLoad(*load)

    async def test_a_server_without_reports(self) -> None:
        async with self.server() as server:
            assert await read_load(server) is None

    @pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "many", "1e999"])
    async def test_a_report_that_cannot_be_true(self, value: str) -> None:
        async with self.server(metrics=f"vllm:num_requests_running {value}\n") as server:
            with pytest.raises(ServerFaultError, match="malformed"):
                await read_load(server)
