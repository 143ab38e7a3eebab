"""Workers of the shipped model are restarted one after the other, under load."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import redis
import redis.asyncio

from promptq import AsyncClient
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import RequestState
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.model_free import text_of
from tests.support.processes import StartedWorker, started
from tests.support.requests import check_log, num_tokens, put, result_of
from tests.support.waiting import until

PROMPTS = ["Once upon a time", "The little fox", "One day, Lily", "In the garden"]
NUM_STREAMS = 8
MAX_TOKENS = 120


def request_fields(n: int) -> dict[str, object]:
    temperature = 0.0 if n % 2 else 1.0
    return {
        "prompt": PROMPTS[n % len(PROMPTS)],
        "seed": n,
        "temperature": temperature,
        "repetition_penalty": 1.1 if n % 3 == 0 else 1.0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "logprobs": 1 if n % 4 == 0 else None,
    }


class Load:
    """So many streams at a time, each followed by another, until it is told to stop."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._stopping = False
        self.ended: list[tuple[int, list[TokenEvent]]] = []
        self.largest_gap = 0.0
        """Seconds between two events of one stream."""

    async def run(self) -> None:
        await asyncio.gather(*(self._repeat(n) for n in range(NUM_STREAMS)))

    def stop(self) -> None:
        self._stopping = True

    async def _repeat(self, n: int) -> None:
        while not self._stopping:
            request_id = await self._client.enqueue(**request_fields(n))
            events: list[TokenEvent] = []
            last: float | None = None
            async for event in self._client.stream(request_id):
                now = time.monotonic()
                if last is not None:
                    self.largest_gap = max(self.largest_gap, now - last)
                last = now
                events.append(event)
            self.ended.append((n, events))


@pytest.mark.long
async def test_a_rolling_restart_costs_no_request_and_changes_no_token(
    redis_url: str, tmp_path: Path
) -> None:
    workers = [await start(tmp_path, redis_url)]
    try:
        async with AsyncClient(redis_url) as client:
            undisturbed = [
                await client.result(await client.enqueue(**request_fields(n)))
                for n in range(NUM_STREAMS)
            ]
            load = Load(client)
            running = asyncio.create_task(load.run())
            for _ in range(2):
                # The new one is there before the old one goes, as deployments do it.
                workers.append(await start(tmp_path, redis_url))
                before = len(load.ended)
                while len(load.ended) < before + NUM_STREAMS:
                    await asyncio.sleep(0.05)
                workers[-2].terminate()
                assert await asyncio.to_thread(workers[-2].wait) == 0
            load.stop()
            await running
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
    for n, events in load.ended:
        ends = [event.end for event in events]
        assert [event.index for event in events] == [0, *ends[:-1]]
        assert [event.is_last for event in events] == [False] * (len(events) - 1) + [True]
        assert [token for event in events for token in event.token_ids] == undisturbed[n].token_ids
        assert "".join(event.text for event in events) == undisturbed[n].text
    print(f"{len(load.ended)} streams, largest gap between two events {load.largest_gap:.3f} s")


async def start(folder: Path, url: str) -> StartedWorker:
    options = ["--drain-seconds", "0.3"]
    return await asyncio.to_thread(StartedWorker, folder, url, *options)


def test_a_second_signal_gives_everything_back_at_once(redis_url: str, tmp_path: Path) -> None:
    options = ["--model", "model-free", "--drain-seconds", "3600", "--max-model-len", "8000"]
    faulty = "tests.faults.worker.faulty_worker"
    with redis.Redis.from_url(redis_url) as client:
        queue = RequestQueue(client)
        with started(tmp_path, redis_url, *options, module=faulty, STEP_SECONDS="0.01") as worker:
            request_id = put(queue, seed=1, max_tokens=1000)
            until(lambda: num_tokens(queue, request_id) > 5)
            worker.terminate()
            before = num_tokens(queue, request_id)
            until(lambda: num_tokens(queue, request_id) > before + 20)  # it goes on
            worker.terminate()
            assert worker.wait() == 0
        assert queue.state(request_id) is RequestState.WAITING
        with started(tmp_path, redis_url, *options, module=faulty):
            assert result_of(queue, request_id)["text"] == text_of(1, 1000)
        assert {event["attempt"] for event in check_log(queue, request_id, text_of(1, 1000))} == {
            1,
            2,
        }
