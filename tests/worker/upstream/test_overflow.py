"""A queue with a worker in front of a slow server, and an overflow worker in front of a cloud."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from promptq import Client
from promptq.shared.errors import RequestFailedError
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import RequestState
from tests.programs.stand_in_server.starting import StandIn, stand_in_server, text_after
from tests.support.processes import StartedWorker, started
from tests.support.requests import num_tokens
from tests.support.roles import as_role
from tests.support.waiting import until

DEADLINE_MS = 10**8
MARGIN_MS = 10**9
"""No worker of the queue would end a request with a deadline in time."""
NUM_TOKENS = 30
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
LATE = {**GREEDY, "deadline_ms": DEADLINE_MS}


@pytest.fixture
def fleet(redis_url: str, model: Path, tmp_path: Path) -> Iterator[Any]:
    """Returns a client, the two servers, and a function that starts a worker in front of one."""
    with redis.Redis.from_url(as_role("operator", redis_url)) as operator:
        operator.hset(Keys("default").config, "overflow_ms", MARGIN_MS)
    with ExitStack() as stack:
        own = stack.enter_context(stand_in_server("vllm", "--token-seconds", "0.02"))
        cloud = stack.enter_context(stand_in_server("openai-remote", "--token-seconds", "0.2"))
        client = stack.enter_context(Client(as_role("operator", redis_url)))

        def start(engine: str, server: StandIn, *options: str) -> StartedWorker:
            named = ("--model", str(model), "--served-model-name", "m", "--lease-ms", "3000")
            where = ("--engine", engine, "--upstream", server.url)
            return stack.enter_context(started(tmp_path, redis_url, *where, *named, *options))

        yield client, own, cloud, start


def start_cloud(start: Any, cloud: StandIn, *options: str) -> StartedWorker:
    worker: StartedWorker = start(
        "openai-remote", cloud, "--overflow", "--max-model-len", "1024", *options
    )
    return worker


def start_own(start: Any, own: StandIn) -> StartedWorker:
    worker: StartedWorker = start(
        "vllm", own, "--max-num-seqs", "1", "--prefetch-depth", "0", "--dtype", "float32"
    )
    return worker


def test_late_requests_go_to_the_cloud_and_come_back_when_its_worker_dies(
    fleet: Any,
) -> None:
    """Their streams, cancels and places in the queue are those of other requests."""
    client, own, cloud, start = fleet
    start_own(start, own)
    patient = [client.enqueue(f"patient {number}", **GREEDY) for number in range(3)]
    until(lambda: num_tokens(client.queue, patient[0]) > 2)
    own.fail("freeze")
    in_cloud = start_cloud(start, cloud)
    late = [client.enqueue(f"late {number}", **LATE) for number in range(4)]
    until(lambda: min(num_tokens(client.queue, request_id) for request_id in late) > 2)
    cloud.fail("freeze")
    assert cloud.told()["running"] == len(late)
    (shown,) = client.stats().overflow_workers
    assert shown.worker_id not in [worker.worker_id for worker in client.stats().workers]

    client.cancel(late[0])
    assert [event.finish_reason for event in client.stream(late[0])][-1] == "cancelled"
    until(lambda: cloud.told()["broken_off"] == 1)
    in_cloud.process.kill()
    own.fail("")
    for number, request_id in enumerate(late[1:], start=1):
        events = [*client.stream(request_id)]
        assert [event.index for event in events[1:]] == [event.end for event in events[:-1]]
        text = "".join(event.text for event in events)
        assert text == text_after(f"late {number}", NUM_TOKENS)
        assert {event.attempt for event in events} == {1, 2}
        result = client.result(request_id)
        assert result.stats.resumed_inexactly
    for number, request_id in enumerate(patient):
        assert client.result(request_id).text == text_after(f"patient {number}", NUM_TOKENS)
    num_tries = 1  # at the start of its worker
    assert cloud.told()["started"] == num_tries + len(late), "no patient request went there"


def test_an_overflow_worker_refuses_nothing(fleet: Any) -> None:
    """Requests that it cannot serve stay for the queue's other workers, even if none lives yet."""
    client, own, cloud, start = fleet
    start_cloud(start, cloud)
    others = [
        client.enqueue("a", **LATE, top_k=1),
        client.enqueue("a", **LATE, resume="exact_only"),
        client.enqueue("a", **LATE, model="m"),
        client.enqueue("a" * 2000, **LATE),
    ]
    served = client.enqueue("a", **LATE)
    assert client.result(served).text == text_after("a", NUM_TOKENS)
    assert client.result(others[2]).text == text_after("a", NUM_TOKENS)
    del others[2]
    assert {client.state(request_id) for request_id in others} == {RequestState.WAITING}
    assert cloud.told()["started"] == 3, "its own try at the start, and two requests"
    start_own(start, own)
    for request_id in others[:2]:
        assert client.result(request_id).text == text_after("a", NUM_TOKENS)
    with pytest.raises(RequestFailedError, match="the prompt is too long"):
        client.result(others[2])
