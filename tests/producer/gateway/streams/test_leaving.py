"""A client that leaves cancels what it asked for, unless it said otherwise."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import httpx2
import pytest

from tests.producer.gateway.living import LiveGateway, sent
from tests.producer.gateway.played import PROMPT, continued, is_cancelled, opened
from tests.producer.playing import HandWorker
from tests.support.waiting import until


@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_cancels(http: httpx2.Client, own_worker: HandWorker, n: int) -> None:
    """All answers of the call, so that a worker stops at its next step."""
    with opened(http, own_worker, {**PROMPT, "n": n}) as (reading, claim):
        reading.next()
    until(lambda: is_cancelled(own_worker, claim.request_id))
    assert own_worker.queue.state(claim.request_id) == "active", "its worker ends it"
    if n == 2:
        other = claim.request_id[:-1] + "1"
        until(lambda: own_worker.queue.state(other) == "cancelled")


def test_a_client_that_leaves_before_the_first_token_cancels(
    start_gateway: Callable[..., LiveGateway], own_worker: HandWorker
) -> None:
    """Whether it streams or waits for the whole answer, and it is counted as one that left."""
    gateway = start_gateway()
    for stream in (True, False):
        body = json.dumps({"prompt": "Hi", "stream": stream}).encode()
        with sent(gateway, "/v1/completions", body, {}):
            until(own_worker.queue.count)
        until(own_worker.queue.is_empty)
    states = {own_worker.redis.hget(key, "state") for key in own_worker.redis.keys("*:request:*")}
    assert states == {b"cancelled"}
    answered = re.compile(r'requests_total{handler="/v1/completions",method="POST",(.*)} (.*)')
    told: list[tuple[str, str]] = []
    while sum(float(count) for _, count in told) < 2:
        told = answered.findall(httpx2.get(f"{gateway.url}/metrics", timeout=None).text)
    assert [status for status, _ in told] == ['status="499"']


def test_a_client_that_said_so_leaves_and_cancels_nothing(
    http: httpx2.Client, own_worker: HandWorker
) -> None:
    """By a field or a header; it can still cancel by the stream's address."""
    for body, headers in (({**PROMPT, "detach": True}, {}), (PROMPT, {"X-Detach": "true"})):
        with opened(http, own_worker, body, **headers) as (reading, claim):
            url = reading.response.headers["X-Stream-Url"]
            event_id, _ = reading.next()
        with continued(http, url, event_id):
            pass  # who reads on leaves as freely
        time.sleep(0.1)
        assert not is_cancelled(own_worker, claim.request_id)
        assert cancelled(http, url) == (True, "flagged")
        assert is_cancelled(own_worker, claim.request_id)


@pytest.mark.parametrize("n", [1, 2])
def test_a_cancel_reports_what_happened(
    http: httpx2.Client, own_worker: HandWorker, n: int
) -> None:
    """An answer that had ended was not cancelled, whether its end is in the log or folded."""
    with opened(http, own_worker, {**PROMPT, "n": n, "detach": True}) as (reading, claim):
        url = reading.response.headers["X-Stream-Url"]
        assert cancelled(http, url) == (True, "flagged"), "its worker ends it"
        own_worker.finish(claim)  # the other one of two was cancelled as it waited
        assert cancelled(http, url) == (False, "finished")
    with opened(http, own_worker, {**PROMPT, "n": n}) as (reading, claim):
        url = reading.response.headers["X-Stream-Url"]
        own_worker.finish(claim, "All")
        if n == 2:
            assert cancelled(http, url) == (True, "cancelled"), "of the other one"
        own_worker.fold_now(claim.request_id)
        assert cancelled(http, url) == (False, "finished")
        assert own_worker.queue.state(claim.request_id) == "completed"


def cancelled(http: httpx2.Client, url: str) -> tuple[bool, str]:
    told = http.delete(url).json()
    return told["cancelled"], told["status"]


def test_whoever_reads_on_cancels_too_unless_it_said_otherwise(
    http: httpx2.Client, own_worker: HandWorker
) -> None:
    """The address remembers what the call said."""
    with opened(http, own_worker, PROMPT) as (reading, claim):
        url = reading.response.headers["X-Stream-Url"]
        reading.next()
        with continued(http, url) as again:
            again.next()
        until(lambda: is_cancelled(own_worker, claim.request_id))
        assert own_worker.queue.state(claim.request_id) == "active", "its worker ends it"
