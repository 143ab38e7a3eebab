"""A client of a gateway that comes back goes on where it stopped; the worker is played by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest
import redis

from promptq import Client
from promptq.shared.protocol.claims import Room
from promptq.shared.server.embedded import EmbeddedServer
from tests.producer.gateway.living import LiveGateway, live_gateway
from tests.producer.gateway.played import (
    CHAT,
    PROMPT,
    continued,
    opened,
    read_frames,
    text_in,
    texts_of,
)
from tests.producer.playing import KEYS, HandWorker
from tests.support.servers import free_port
from tests.support.waiting import until


@pytest.mark.parametrize("body", [PROMPT, CHAT])
@pytest.mark.parametrize("how", ["GET", "POST"])
def test_a_client_that_comes_back_goes_on_where_it_stopped(
    http: httpx2.Client, own_worker: HandWorker, body: dict[str, Any], how: str
) -> None:
    """From the stream's address, or by the same call, and the tokens meanwhile are not lost."""
    with opened(http, own_worker, {**body, "detach": True}) as (reading, claim):
        url = reading.response.headers["X-Stream-Url"]
        own_worker.send(claim, "bc")
        event_id, _ = reading.next()
        event_id, chunk = reading.next()
        assert text_in(chunk) == "bc"
    own_worker.send(claim, "de")
    own_worker.finish(claim, "f")
    if how == "GET":
        with continued(http, url, event_id) as again:
            frames = again.rest()
    else:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        headers = {"Last-Event-ID": event_id}
        with http.stream("POST", path, json=body, headers=headers) as response:
            frames = list(read_frames(response))
    assert texts_of(frames) == "def"
    assert frames[-1][1] == "[DONE]"
    assert frames[-2][1]["choices"][0]["finish_reason"] == "stop"
    assert all("role" not in frame["choices"][0].get("delta", {}) for _, frame in frames[:-1])
    assert len(own_worker.redis.keys(KEYS.request("*"))) == 1


def test_any_place_of_a_stream_can_be_gone_on_from(
    http: httpx2.Client, own_worker: HandWorker
) -> None:
    """Also when its log has long been folded into the result."""
    with opened(http, own_worker, {**PROMPT, "detach": True}) as (reading, claim):
        url = reading.response.headers["X-Stream-Url"]
        own_worker.send(claim, "äb")
        own_worker.finish(claim, "c")
        frames = reading.rest()
    for _ in range(2):
        for place, (event_id, _) in enumerate(frames[:-1]):
            with continued(http, url, event_id) as again:
                rest = again.rest()
            assert texts_of(rest) == texts_of(frames[place + 1 :])
            assert rest[-1][1] == "[DONE]"
        with continued(http, url) as whole:
            assert texts_of(whole.rest()) == "aäbc"
        own_worker.fold_now(claim.request_id)


def test_a_stream_that_is_read_twice_says_the_same_twice(
    http: httpx2.Client, own_worker: HandWorker
) -> None:
    """Also in another second: it was created at the time that its id has."""
    with opened(http, own_worker, CHAT) as (reading, claim):
        url = reading.response.headers["X-Stream-Url"]
        own_worker.send(claim, "b")
        own_worker.finish(claim, "c")
        frames = reading.rest()
    chunk = frames[0][1]
    in_id = UUID(chunk["id"].removeprefix("chatcmpl-")).int >> 80
    assert chunk["created"] == in_id // 1000
    until(lambda: time.time() >= chunk["created"] + 1)
    with continued(http, url) as again:
        assert again.rest() == frames


def test_a_call_that_comes_again_while_the_first_runs(
    http: httpx2.Client, own_worker: HandWorker
) -> None:
    """Both calls have one idempotency key, and get the one answer as it comes."""
    headers, body = {"Idempotency-Key": "mine"}, {**PROMPT, "detach": True}
    with (
        opened(http, own_worker, body, **headers) as (reading, claim),
        http.stream("POST", "/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.headers["X-Request-Id"] == claim.request_id
        frames = read_frames(response)
        assert text_in(next(frames)[1]) == reading.text(1) == "a"
        own_worker.finish(claim, "b")
        assert texts_of(list(frames)) == texts_of(reading.rest()) == "b"
    assert len(own_worker.redis.keys(KEYS.request("*"))) == 1


def test_a_call_that_is_to_wait_a_while(
    start_gateway: Callable[..., LiveGateway], own_worker: HandWorker
) -> None:
    """Nobody gets it before `delay_ms` are over."""
    gateway = start_gateway(http_header_seconds=0)
    room = Room(max_count=1, token_budget=2**40)
    body = {**PROMPT, "delay_ms": 3_600_000}
    with (
        httpx2.Client(base_url=gateway.url, timeout=None) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        request_id = response.headers["X-Request-Id"]
        seconds, _ = own_worker.redis.time()
        due = own_worker.redis.zscore(KEYS.delayed, request_id)
        assert 3_000_000 < due - seconds * 1000 <= 3_601_000
        assert own_worker.queue.take_batch(room) == []
        own_worker.redis.zadd(KEYS.delayed, {request_id: due - 3_600_000})
        until(lambda: own_worker.redis.time()[0] * 1000 > due - 3_600_000)
        own_worker.finish(own_worker.take(), "a")
        assert texts_of(list(read_frames(response))) == "a"


def test_who_could_not_read_on_reads_the_answer_anew(
    start_gateway: Callable[..., LiveGateway], own_worker: HandWorker
) -> None:
    """Here tokens that it has read were lost, and other ones took their place."""
    first, second = start_gateway(), start_gateway()
    with (
        httpx2.Client(base_url=first.url, timeout=30) as http,
        opened(http, own_worker, PROMPT, "ab") as (reading, claim),
    ):
        url = reading.response.headers["X-Stream-Url"]
        assert reading.text(1) == "ab"
        own_worker.redis.delete(KEYS.tokens(claim.request_id))
        own_worker.adopt(claim)
        own_worker.send(claim, "ax")
        [(_, data)] = reading.rest()
        assert "read the request anew" in data["error"]["message"]
    time.sleep(0.3)
    with (
        httpx2.Client(base_url=second.url, timeout=30) as http,
        continued(http, url) as again,
    ):
        assert again.text(1) == "ax"
        own_worker.finish(claim, "c")
        assert texts_of(again.rest()) == "c"


def test_streams_survive_a_restart_of_the_gateway(
    start_gateway: Callable[..., LiveGateway], own_worker: HandWorker
) -> None:
    """Nothing that a stream needs lives in the process: another one goes on with it."""
    first, second = start_gateway(), start_gateway()
    with (
        httpx2.Client(base_url=first.url, timeout=30) as http,
        opened(http, own_worker, PROMPT) as (reading, claim),
    ):
        url = reading.response.headers["X-Stream-Url"]
        event_id, _ = reading.next()
        own_worker.send(claim, "b")
        with (
            httpx2.Client(base_url=second.url, timeout=30) as other,
            continued(other, url, event_id) as again,
        ):
            assert again.text(1) == "b"
            own_worker.finish(claim, "c")
            assert texts_of(again.rest()) == "c"
        assert texts_of(reading.rest()) == "bc"


def test_a_stream_outlasts_a_restart_of_redis(tmp_path: Path) -> None:
    """The stream waits for the server and goes on; the client only sees a pause."""
    server = EmbeddedServer(free_port(), tmp_path)
    url = server.url
    try:
        with (
            live_gateway(url) as gateway,
            httpx2.Client(base_url=gateway.url, timeout=30) as http,
            redis.Redis.from_url(url) as connection,
            opened(http, worker := HandWorker(connection), PROMPT) as (reading, claim),
        ):
            reading.next()
            server.stop()
            server = EmbeddedServer(server.port, tmp_path, password=server.password)
            worker.send(claim, "b")
            assert reading.text(1) == "b"
            worker.finish(claim, "c")
            assert texts_of(reading.rest()) == "c"
    finally:
        server.stop()


def test_an_unknown_stream(http: httpx2.Client, own_worker: HandWorker) -> None:
    unknown = "cmpl-0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10"
    for url in (f"/v1/streams/{unknown}", "/v1/streams/nothing"):
        assert http.get(url).status_code == 404
        assert http.delete(url).status_code == 404
    headers = {"Last-Event-ID": f"{unknown}/3-3"}
    assert http.post("/v1/completions", json=PROMPT, headers=headers).status_code == 404
    for number in ("0", "257", "1" * 5000):
        assert http.get(f"/v1/streams/{unknown}?choices={number}").status_code == 400


def test_a_wrong_last_event_id(http: httpx2.Client, own_worker: HandWorker) -> None:
    with opened(http, own_worker, PROMPT) as (reading, _):
        url = reading.response.headers["X-Stream-Url"]
        event_id, _ = reading.next()
        for wrong in ("x", "x/1", event_id + ".1-1", "cmpl-other/1-1"):
            answer = http.get(url, headers={"Last-Event-ID": wrong})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "Last-Event-ID"


@pytest.mark.parametrize("body", [PROMPT, CHAT])
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_of_another_client_is_no_stream(
    http: httpx2.Client, redis_url: str, own_worker: HandWorker, body: dict[str, Any], n: int
) -> None:
    """Its id says nothing of when it was created, as a completion's does."""
    with Client(redis_url) as client:
        for name in ("story-1", "story-1:0"):
            client.enqueue("Hi", request_id=name)
            own_worker.finish(own_worker.take(), "a")
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = {"Last-Event-ID": "story-1/" + ".".join(["0-0"] * n)}
    posted = http.post(path, json={**body, "n": n}, headers=headers)
    got = http.get(f"/v1/streams/story-1?choices={n}&n={n}", headers=headers)
    for answer in (posted, got):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("body", [PROMPT, CHAT])
def test_only_a_stream_goes_on(
    http: httpx2.Client, own_worker: HandWorker, body: dict[str, Any]
) -> None:
    """Whoever asks for the whole answer so is told, and nothing runs a second time."""
    with opened(http, own_worker, body) as (reading, _):
        event_id, _ = reading.next()
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = http.post(
            path, json={**body, "stream": False}, headers={"Last-Event-ID": event_id}
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Last-Event-ID"
    assert "stream: true" in answer.json()["error"]["message"]
    assert own_worker.queue.is_empty()
