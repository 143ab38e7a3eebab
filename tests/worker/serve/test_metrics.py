"""A worker's metrics, scraped over HTTP while real requests go through it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from promptq import AsyncClient
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import FinishReason
from promptq.shared.runtime import metrics
from promptq.worker.serve.metrics_server import MetricsServer
from promptq.worker.serve.worker import Worker
from tests.support.model_free import running_worker, served_model_free, text_of
from tests.support.processes import read_line, running
from tests.support.roles import as_role
from tests.support.waiting import async_until

Families = dict[str, Metric]


async def scrape(worker: Worker) -> Families:
    server = MetricsServer(worker, "127.0.0.1", 0)
    try:
        return await asyncio.to_thread(families_at, server.url)
    finally:
        await asyncio.to_thread(server.close)


def families_at(url: str) -> Families:
    with urllib.request.urlopen(url) as reply:
        text = reply.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: Families, spec: metrics.Spec, suffix: str = "", **labels: str) -> float:
    suffix = suffix or ("_total" if spec.kind == "counter" else "")
    samples = families[spec.full_name].samples
    wanted = {"model_name": "model-free", "engine": "0", **labels}
    found = [
        it.value
        for it in samples
        if it.name == spec.full_name + suffix and wanted.items() <= it.labels.items()
    ]
    assert len(found) == 1, (spec, found)
    return found[0]


async def until_idle(worker: Worker) -> None:
    """Subscribers may hear of an end before its worker has heard that it was taken."""
    await async_until(lambda: not (len(worker.leases) or worker.engine.stats.num_used_blocks))


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(redis_url) as opened:
        yield opened


async def test_a_scrape_has_the_requests_that_were_served(
    redis_url: str, client: AsyncClient
) -> None:
    served = served_model_free(block_size=4, step_seconds=0.002)
    async with running_worker(redis_url, served) as worker:
        for _ in range(3):
            await client.generate("prompt of 18 bytes", max_tokens=10)
        await client.result(await client.enqueue("x", model="other"), check=False)
        cancelled = await client.enqueue("x", max_tokens=4000)
        await anext(client.stream(cancelled))
        running = await scrape(worker)
        await client.cancel(cancelled)
        await until_idle(worker)
        await async_until(lambda: worker.meter.num_ended[FinishReason.CANCELLED])
        told = await scrape(worker)
    assert value(running, metrics.RUNNING) == value(running, metrics.LEASES) == 1
    assert 0 < value(running, metrics.KV_USAGE) <= 1
    assert value(told, metrics.RUNNING) == value(told, metrics.KV_USAGE) == 0
    assert value(told, metrics.PROMPT_TOKENS) == value(told, metrics.PREFIX_QUERIES) == 3 * 18 + 1
    assert value(told, metrics.PREFIX_HITS) == 2 * 16  # whole blocks
    assert value(told, metrics.SUCCESS, finished_reason="length") == 3
    assert value(told, metrics.SUCCESS, finished_reason="error") == 1
    assert value(told, metrics.SUCCESS, finished_reason="abort") == 1
    assert value(told, metrics.CLAIMS) == 5
    assert value(told, metrics.REFUSED) == 1
    assert value(told, metrics.FIRST_TOKEN, "_count") == 4
    assert value(told, metrics.END_TO_END, "_count") == 3
    assert value(told, metrics.REQUEST_OUTPUT, "_sum") == 30
    assert value(told, metrics.REQUEST_OUTPUT, "_bucket", le="10.0") == 3
    assert value(told, metrics.REQUEST_OUTPUT, "_bucket", le="5.0") == 0
    assert value(told, metrics.REQUEST_MOST_OUTPUT, "_sum") == 30
    assert value(told, metrics.REQUEST_MAX_TOKENS, "_sum") == 30
    inference, parts = metrics.INFERENCE_TIME, (metrics.PREFILL_TIME, metrics.DECODE_TIME)
    assert value(told, inference, "_count") == value(told, metrics.TOKEN_TIME, "_count") == 3
    assert value(told, inference, "_sum") == pytest.approx(
        sum(value(told, it, "_sum") for it in parts)
    )
    assert value(told, metrics.TOKEN_TIME, "_sum") == pytest.approx(
        value(told, metrics.DECODE_TIME, "_sum") / 9
    )
    generated = value(told, metrics.GENERATION_TOKENS)
    assert generated >= 31
    gaps = value(told, metrics.BETWEEN_TOKENS, "_count")
    assert generated - 4 - 64 <= gaps <= generated - 4, (
        "of a cancelled one what was on its way is not"
    )
    assert value(told, metrics.STEP_TOKENS, "_sum") == pytest.approx(generated + 23, abs=3)
    assert value(told, metrics.PUBLISH_TIME, "_count") > 0
    assert value(told, metrics.PUBLISHED) >= 31
    assert value(told, metrics.ATTEMPTS, "_bucket", le="1.0") == 3
    assert value(told, metrics.CLAIM_TIME, "_count") >= 3
    assert value(told, metrics.QUEUE_TIME, "_sum") < value(told, metrics.FIRST_TOKEN, "_sum") < 10


async def test_latencies_between_tokens_are_those_of_the_steps(
    redis_url: str, client: AsyncClient
) -> None:
    async with running_worker(redis_url, served_model_free(step_seconds=0.03)) as worker:
        began = time.monotonic()
        await asyncio.gather(*(client.generate("x", max_tokens=8) for _ in range(4)))
        seconds = time.monotonic() - began
        await until_idle(worker)
        told = await scrape(worker)
    count = value(told, metrics.BETWEEN_TOKENS, "_count")
    assert count == 4 * 7
    assert count * 0.03 <= value(told, metrics.BETWEEN_TOKENS, "_sum") < 4 * seconds
    assert value(told, metrics.BETWEEN_TOKENS, "_bucket", le="0.025") == 0


async def test_an_end_by_a_stop_string_reports_its_times_too(
    redis_url: str, client: AsyncClient
) -> None:
    """The engine does not end it, the worker does."""
    async with running_worker(redis_url, served_model_free(step_seconds=0.01)) as worker:
        result = await client.generate("x", seed=1, stop=text_of(1, 12)[8:], max_tokens=100)
        await until_idle(worker)
        told = await scrape(worker)
    assert result.finish_reason == "stop"
    assert result.stats is not None
    assert result.stats.prompt_ms >= 10
    assert result.stats.generation_ms >= 10 * 10
    assert value(told, metrics.DECODE_TIME, "_sum") >= 0.1


async def test_a_request_that_another_attempt_took_counts_as_a_lost_fence(
    redis_url: str, client: AsyncClient
) -> None:
    async with running_worker(redis_url, served_model_free(step_seconds=0.01)) as worker:
        request_id = await client.enqueue("x", max_tokens=2000)
        await anext(client.stream(request_id))
        async with redis.asyncio.Redis.from_url(redis_url) as connection:
            await connection.hset(Keys().request(request_id), "fence", "2-another")
        await until_idle(worker)
        told = await scrape(worker)
    assert value(told, metrics.FENCES_LOST) == 1
    assert value(told, metrics.SUCCESS, finished_reason="length") == 0


async def test_preempted_and_prepared_requests_are_reported(
    redis_url: str, client: AsyncClient
) -> None:
    """One slot: a more urgent request takes it, and two more are prepared beyond it."""
    served = served_model_free(max_num_seqs=1, step_seconds=0.01, num_blocks=1024)
    async with running_worker(redis_url, served, prefetch_depth=2) as worker:
        slow = await client.enqueue("a prompt", priority=5, max_tokens=6000)
        await anext(client.stream(slow))
        before = await scrape(worker)
        urgent = await client.enqueue("now", priority=-5, max_tokens=6000)
        await anext(client.stream(urgent))
        later = [await client.enqueue("then", priority=9, max_tokens=2) for _ in range(3)]
        await async_until(lambda: len(worker.leases.ready) >= 2)
        during = await scrape(worker)
        await client.cancel(urgent)
        await client.result(urgent, check=False)
        while worker.engine.stats.recomputed_tokens == 0:  # none, where its last block was full
            await client.generate("now", priority=-5, max_tokens=1)
        await client.cancel(slow)
        for request_id in later:
            await client.result(request_id)
        await until_idle(worker)
        after = await scrape(worker)
        told = worker.heartbeat.stats()
    handed_out = value(after, metrics.PREFETCH_HAND_OUTS)
    assert handed_out == value(after, metrics.CLAIMS) >= 5
    assert value(during, metrics.PREFETCH_WAIT) < value(after, metrics.PREFETCH_WAIT)
    assert value(during, metrics.PREFETCH_FILL) < value(after, metrics.PREFETCH_FILL)
    # Who lies prepared makes it fuller for as long as it does.
    assert value(after, metrics.PREFETCH_FILL) == pytest.approx(
        value(after, metrics.PREFETCH_WAIT), rel=0.1
    )
    assert told.mean_prefetch_wait_ms == pytest.approx(
        value(after, metrics.PREFETCH_WAIT) / handed_out * 1000
    )
    assert told.num_prefetch_empty >= value(after, metrics.PREFETCH_EMPTY) > 0
    assert told.mean_prefetched > 0
    assert value(before, metrics.PREEMPTIONS) == value(before, metrics.WAITING) == 0
    assert value(during, metrics.PREEMPTIONS) == 1 <= value(after, metrics.PREEMPTIONS)
    assert value(during, metrics.RUNNING) == 1
    assert value(during, metrics.PREFETCHED) == 2
    assert value(during, metrics.WAITING) == value(during, metrics.LEASES) - 1 >= 3
    assert value(during, metrics.RECOMPUTED) == 0
    assert value(after, metrics.RECOMPUTED) > 0
    assert value(after, metrics.WAITING) == value(after, metrics.PREFETCHED) == 0


async def test_drafted_tokens_are_reported(redis_url: str, client: AsyncClient) -> None:
    """The prompt is what the answer will be, so that what is drafted from it holds."""
    async with running_worker(redis_url, served_model_free(speculative_tokens=4)) as worker:
        result = await client.generate(text_of(3, 40), seed=3, max_tokens=30)
        await until_idle(worker)
        told = await scrape(worker)
    assert result.text == text_of(3, 30)
    assert 0 < value(told, metrics.ACCEPTED) <= value(told, metrics.DRAFTED)
    assert value(told, metrics.GENERATION_TOKENS) == 30


async def test_a_port_that_is_taken_is_named(redis_url: str) -> None:
    async with running_worker(redis_url) as worker:
        first = MetricsServer(worker, "127.0.0.1", 0)
        port = int(first.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigurationError, match=f"--metrics-port.*{port}"):
            MetricsServer(worker, "127.0.0.1", port)
        await asyncio.to_thread(first.close)


def test_the_command_serves_metrics_where_it_says(redis_url: str) -> None:
    url = as_role("worker", redis_url)
    command = [sys.executable, "-m", "promptq.worker", "--model", "model-free", "--redis", url]
    command += ["--metrics-port", "0"]
    with running(*command, stdout=subprocess.PIPE, text=True) as process:
        url = read_line(process).rsplit("metrics at ", 1)[1].strip()
        assert value(families_at(url), metrics.RUNNING) == 0
        process.terminate()
        assert process.wait() == 0
