"""A failover under Sentinel, under load: streams go on, or end with a clear error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from promptq import AsyncClient, Client
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue
from tests.faults.sentinels import Guarded, guarded_by_three
from tests.support.model_free import text_of
from tests.support.processes import started
from tests.support.requests import check_log, num_tokens, put, result_of
from tests.support.roles import as_role
from tests.support.waiting import async_until, until

FAULTY = "tests.faults.worker.faulty_worker"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    with guarded_by_three(tmp_path) as guarded:
        yield guarded


LEASE = ("--lease-ms", "20000")
"""None runs out while a failover takes place, on a slow machine neither; workers reap meanwhile."""
LENGTH = 800
SLOWLY = {"STEP_SECONDS": "0.01"}
"""Streams of this length are still running when the master is lost, wherever the machine stalls."""


def num_crashes(queue: RequestQueue, request_id: str) -> int:
    return int(queue.run(lookups.record(queue.keys, request_id)).get("crashes", 0))


async def test_streams_outlive_a_failover(guarded: Guarded, tmp_path: Path) -> None:
    """And nobody counts it as a fault of what runs."""
    with (
        started(tmp_path, guarded.url, *LEASE, module=FAULTY) as one,
        started(tmp_path, guarded.url, *LEASE, module=FAULTY) as two,
    ):
        async with AsyncClient(guarded.url) as client:
            ids = [await client.enqueue("a", seed=n, max_tokens=1500) for n in range(16)]
            reading = [asyncio.create_task(client.result(request_id)) for request_id in ids]
            with guarded.master.client() as own:
                queue = RequestQueue(own)
                await async_until(
                    lambda: all(num_tokens(queue, request_id) > 50 for request_id in ids)
                )
            guarded.kill_master()
            for n, result in enumerate(await asyncio.gather(*reading)):
                assert result.text == text_of(n, 1500)
        assert guarded.replica_role() == "master"
        with guarded.replica.client() as own:
            queue = RequestQueue(own)
            for n, request_id in enumerate(ids):
                check_log(queue, request_id, text_of(n, 1500))
                assert num_crashes(queue, request_id) == 0
        for worker in (one, two):
            worker.terminate()
            assert worker.wait() == 0


def test_a_failover_that_loses_writes_loses_no_stream(guarded: Guarded, tmp_path: Path) -> None:
    """The worker sends again what the new master has not got; its reader sees no seam."""
    with (
        started(tmp_path, guarded.url, *LEASE, module=FAULTY, **SLOWLY) as worker,
        Client(guarded.url) as client,
        guarded.master.client() as own,
    ):
        request_id = client.enqueue("a", seed=1, max_tokens=LENGTH)
        stream = client.stream(request_id)
        text = "".join(next(stream).text for _ in range(100))
        guarded.lose_writes()
        text += "".join(next(stream).text for _ in range(200))
        with guarded.replica.client() as replica:
            kept = num_tokens(RequestQueue(replica), request_id)
            assert 0 < kept < num_tokens(RequestQueue(own), request_id)
            guarded.fail_over()
            text += "".join(event.text for event in stream)
            assert text == text_of(1, LENGTH)
            log = check_log(RequestQueue(replica), request_id, text)
            assert {event["attempt"] for event in log} == {1}
            assert num_crashes(RequestQueue(replica), request_id) == 0
        assert worker.logged("the log lost events; sending them again")


def test_a_claim_that_a_failover_lost_is_made_anew(guarded: Guarded, tmp_path: Path) -> None:
    """The old worker's events are fenced off, and the new attempt gives the same tokens, even
    without a seed.
    """
    with guarded.master.client() as own, guarded.replica.client() as replica:
        before, after = RequestQueue(own), RequestQueue(replica)
        ids = [put(before, seed=1, max_tokens=LENGTH), put(before, max_tokens=LENGTH)]
        until(lambda: after.count() == len(ids))
        guarded.lose_writes()
        with (
            started(tmp_path, guarded.url, "--lease-ms", "2000", module=FAULTY, **SLOWLY) as worker,
            Client(as_role("subscriber", guarded.url)) as client,
        ):
            streams = [client.stream(request_id) for request_id in ids]
            begun = ["".join(next(stream).text for _ in range(100)) for stream in streams]
            given = int(before.run(lookups.record(before.keys, ids[1]))["seed"])
            guarded.fail_over()
            for request_id, seed, stream, text in zip(ids, (1, given), streams, begun, strict=True):
                text += "".join(event.text for event in stream)
                assert text == text_of(seed, LENGTH)
                assert result_of(after, request_id)["text"] == text
            until(lambda: worker.logged("lease lost"))
