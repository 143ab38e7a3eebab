"""Streams of a gateway: reconnecting, restarting, leaving; the worker is played by hand."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest
import redis
from openai import AsyncOpenAI, OpenAI

from promptq import Client
from promptq.producer.gateway.app import create_app
from promptq.producer.settings import GatewaySettings
from promptq.shared.protocol.claims import Claim, Room
from promptq.shared.protocol.events import ErrorInfo, TokenEvent
from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.rows import Row
from promptq.shared.server.embedded import EmbeddedServer
from tests import model_free_worker
from tests.model_free_worker import running_worker
from tests.ports import free_port
from tests.producer.gateway.living import LiveGateway, live_gateway
from tests.producer.playing import KEYS, HandWorker
from tests.waiting import until

PROMPT = {"prompt": "Hi", "stream": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


@dataclass
class Reading:
    """A stream as a plain client sees it."""

    response: httpx2.Response
    frames: Iterator[tuple[str, Any]]

    def next(self) -> tuple[str, Any]:
        """The next event's id and data."""
        return next(self.frames)

    def text(self, num_events: int) -> str:
        return "".join(text_of(self.next()[1]) for _ in range(num_events))

    def rest(self) -> list[tuple[str, Any]]:
        return list(self.frames)


def text_of(chunk: Any) -> str:
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for choice in chunk["choices"]
    )


def texts_of(frames: list[tuple[str, Any]]) -> str:
    return "".join(text_of(data) for _, data in frames if data != "[DONE]")


def read_frames(response: httpx2.Response) -> Iterator[tuple[str, Any]]:
    event_id, data = "", ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data:
            yield event_id, data if data == "[DONE]" else json.loads(data)
            event_id, data = "", ""


@contextmanager
def opened(
    http: httpx2.Client, worker: HandWorker, body: dict[str, Any], text: str = "a", **headers: str
) -> Iterator[tuple[Reading, Claim]]:
    """A stream of a request that has emitted `text`, which is when its answer begins."""
    with ThreadPoolExecutor() as beside:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        asked = http.build_request("POST", path, json=body, headers=headers)
        asking = beside.submit(lambda: http.send(asked, stream=True))
        claim = worker.queue.take()
        assert claim is not None
        worker.adopt(claim)
        worker.send(claim, text)
        response = asking.result()
    with closing(response):
        yield Reading(response, read_frames(response)), claim


@contextmanager
def continued(http: httpx2.Client, url: str, event_id: str = "") -> Iterator[Reading]:
    headers = {"Last-Event-ID": event_id} if event_id else {}
    with http.stream("GET", url, headers=headers) as response:
        yield Reading(response, read_frames(response))


def is_cancelled(worker: HandWorker, request_id: str) -> bool:
    return bool(worker.redis.hget(KEYS.request(request_id), "cancelled") == b"1")


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
        assert text_of(chunk) == "bc"
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
    """The same idempotency key: both get the one answer as it comes."""
    headers, body = {"Idempotency-Key": "mine"}, {**PROMPT, "detach": True}
    with (
        opened(http, own_worker, body, **headers) as (reading, claim),
        http.stream("POST", "/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.headers["X-Request-Id"] == claim.request_id
        frames = read_frames(response)
        assert text_of(next(frames)[1]) == reading.text(1) == "a"
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


def test_several_answers_go_on_where_each_stopped(
    http: httpx2.Client, own_worker: HandWorker
) -> None:
    """An event's id tells of all choices; the usage comes once, with all of them in it."""
    body = {**PROMPT, "n": 2, "detach": True, "stream_options": {"include_usage": True}}
    with opened(http, own_worker, body) as (reading, first):
        second = own_worker.take()
        url = reading.response.headers["X-Stream-Url"]
        reading.next()
        own_worker.send(second, "xy")
        event_id, chunk = reading.next()
        assert chunk["choices"][0]["index"] == 1
    own_worker.finish(first, "b")
    own_worker.finish(second, "z")
    with continued(http, url, event_id) as again:
        *chunks, usage, done = again.rest()
    texts = {data["choices"][0]["index"]: data["choices"][0]["text"] for _, data in chunks}
    assert texts == {0: "b", 1: "z"}
    assert usage[1]["choices"] == []
    assert usage[1]["usage"]["completion_tokens"] == 5
    assert done[1] == "[DONE]"


def test_a_chat_of_several_answers_begins_with_their_roles(
    http: httpx2.Client, own_worker: HandWorker
) -> None:
    """In their order and without ids, whichever answers first; whoever goes on has them."""
    body = {**CHAT, "n": 2, "detach": True}
    with ThreadPoolExecutor() as beside:
        asked = http.build_request("POST", "/v1/chat/completions", json=body)
        asking = beside.submit(lambda: http.send(asked, stream=True))
        first, second = (it for _ in range(2) if (it := own_worker.queue.take()) is not None)
        for claim, texts in ((second, "xy"), (first, "ab")):
            own_worker.adopt(claim)
            for text in texts:
                own_worker.send(claim, text)
            own_worker.finish(claim)
        with closing(asking.result()) as response:
            url = response.headers["X-Stream-Url"]
            frames = list(read_frames(response))
    begin, rest = frames[:2], frames[2:]
    assert [event_id for event_id, _ in begin] == ["", ""]
    assert [data["choices"][0]["index"] for _, data in begin] == [0, 1]
    for _, data in begin:
        assert data["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in data["choices"][0]["delta"] for _, data in rest[:-1])
    for place, (event_id, _) in enumerate(rest[:-1]):
        with continued(http, url, event_id) as again:
            frames = again.rest()
        assert sorted(texts_of(frames)) == sorted(texts_of(rest[place + 1 :]))
        assert all("role" not in data["choices"][0]["delta"] for _, data in frames[:-1])


def test_openai_client_gathers_several_answers_to_a_chat(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    """Also when the second begins first: it finds a choice by how many it has heard of before."""
    has_begun = threading.Event()

    def read() -> list[str | None]:
        with (
            OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client,
            client.chat.completions.stream(model="", messages=CHAT["messages"], n=2) as stream,
        ):
            for _ in stream:
                has_begun.set()
            got = stream.get_final_completion()
        assert [choice.message.role for choice in got.choices] == ["assistant"] * 2
        return [choice.message.content for choice in got.choices]

    with ThreadPoolExecutor() as beside:
        reading = beside.submit(read)
        first, second = (it for _ in range(2) if (it := own_worker.queue.take()) is not None)
        own_worker.adopt(first)
        own_worker.adopt(second)
        own_worker.send(second, "x")
        until(lambda: has_begun.is_set() or reading.done())
        own_worker.finish(first, "ab")
        own_worker.finish(second, "y")
        assert reading.result() == ["ab", "xy"]


@pytest.mark.parametrize("has_begun", [False, True])
def test_frames_of_several_answers_keep_their_order(
    http: httpx2.Client, own_worker: HandWorker, has_begun: bool
) -> None:
    """An id counts only what has gone out before: also while the answer begins, whatever comes."""

    def publish(*events: tuple[Claim, str]) -> None:
        """All at once; an empty text makes no frame."""
        rows = []
        for claim, text in events:
            index = ends[claim.request_id]
            ends[claim.request_id] += text != "end"
            event = TokenEvent(index=index, token_ids=[1], text=text, attempt=claim.attempt)
            if text == "end":
                last = {"token_ids": [], "text": "", "finish_reason": FinishReason.STOP}
                event = event.model_copy(update=last)
            rows.append(Row.of(claim.request_id, claim.fence, event))
        own_worker.queue.publish(rows)

    for _ in range(10):
        ends: Counter[str] = Counter()
        with ThreadPoolExecutor() as beside:
            asked = http.build_request("POST", "/v1/completions", json={**PROMPT, "n": 2})
            asking = beside.submit(lambda asked=asked: http.send(asked, stream=True))
            a, b = (it for _ in range(2) if (it := own_worker.queue.take()) is not None)
            publish((a, ""), (b, ""))
            if has_begun:
                publish((b, "."))
                asking.result()
            publish((a, "."), (b, "."), (a, "."))
            publish((a, "end"), (b, "end"))
            with closing(asking.result()) as response:
                *frames, _ = read_frames(response)
        num_chars = [0, 0]
        for event_id, chunk in frames:
            [choice] = chunk["choices"]
            num_chars[choice["index"]] += len(choice["text"])
            read = [int(it.strip("e").split("-")[1]) for it in event_id.split("/")[1].split(".")]
            assert read == num_chars
        assert num_chars == [2, 2 if has_begun else 1]


@pytest.mark.parametrize("has_begun", [False, True])
def test_one_of_several_answers_fails(
    http: httpx2.Client, own_worker: HandWorker, has_begun: bool
) -> None:
    """The call has failed, by its status or in its stream, and the other is cancelled."""
    with ThreadPoolExecutor() as beside:
        asked = http.build_request("POST", "/v1/completions", json={**PROMPT, "n": 2})
        asking = beside.submit(lambda: http.send(asked, stream=True))
        claims = [it for _ in range(2) if (it := own_worker.queue.take()) is not None]
        for claim in claims:
            own_worker.adopt(claim)
        if has_begun:
            own_worker.send(claims[1], "a")
            asking.result()
        error = ErrorInfo(type="internal_error", message="it broke")
        own_worker.send(claims[0], "", FinishReason.ERROR, error=error)
        with closing(asking.result()) as response:
            assert response.status_code == (200 if has_begun else 500)
            answer = response.read().decode()
    assert "it broke" in answer
    assert "[DONE]" not in answer
    until(lambda: is_cancelled(own_worker, claims[1].request_id))


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_an_error_of_the_reader_ends_no_answer(
    http: httpx2.Client, own_worker: HandWorker, n: int, detach: bool
) -> None:
    """One answer or several: here the server lost a record, and what else there is goes on."""
    with opened(http, own_worker, {**PROMPT, "n": n, "detach": detach}) as (reading, lost):
        reading.next()
        own_worker.redis.delete(KEYS.request(lost.request_id), KEYS.tokens(lost.request_id))
        *_, (_, data) = reading.rest()
    assert data["error"]["code"] == "not_found"
    time.sleep(0.3)
    assert not is_cancelled(own_worker, lost.request_id)
    if n == 2:
        other = own_worker.take()
        assert other.request_id == lost.request_id[:-1] + "1"
        assert not is_cancelled(own_worker, other.request_id)


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
        body = {"prompt": "Hi", "stream": stream}
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(
                f"{gateway.url}/v1/completions", json=body, timeout=httpx2.Timeout(None, read=1.0)
            )
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
        assert http.delete(url).json()["cancelled"] is True
        assert is_cancelled(own_worker, claim.request_id)


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


def test_a_stream_outlasts_a_restart_of_redis(tmp_path: Path) -> None:
    """It waits for the server and goes on; the client only sees that nothing comes for a while."""
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


def test_a_stream_that_waits_shows_that_it_lives(
    start_gateway: Callable[..., LiveGateway], own_worker: HandWorker
) -> None:
    """After a while the status is sent without a token, and then comments."""
    gateway = start_gateway(http_header_seconds=0.05, http_keepalive_seconds=0.05)
    with (
        httpx2.Client(base_url=gateway.url, timeout=30) as http,
        http.stream("POST", "/v1/completions", json=PROMPT) as response,
    ):
        lines = response.iter_lines()
        assert [next(lines) for _ in range(2)] == [": waiting", ": waiting"]
        claim = own_worker.take()
        own_worker.finish(claim, "a")
        assert "[DONE]" in "".join(lines)


def text_by_openai(base_url: str) -> str:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="", prompt="Hi", stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)


async def text_by_async_openai(base_url: str) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="", prompt="Hi", stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])


@pytest.mark.parametrize(
    "read",
    [text_by_openai, lambda base_url: asyncio.run(text_by_async_openai(base_url))],
    ids=["sync", "async"],
)
def test_openai_clients_pass_over_comments_in_mid_stream(
    start_gateway: Callable[..., LiveGateway],
    own_worker: HandWorker,
    read: Callable[[str], str],
) -> None:
    """They make an event of any blank line behind an event with an id, and fail as it is empty."""
    gateway = start_gateway(http_header_seconds=0.05, http_keepalive_seconds=0.05)
    with ThreadPoolExecutor() as beside, httpx2.Client(base_url=gateway.url, timeout=None) as http:
        reading = beside.submit(read, gateway.base_url)
        claim = own_worker.queue.take()
        assert claim is not None
        own_worker.adopt(claim)
        own_worker.send(claim, "a")
        with http.stream("GET", f"/v1/streams/{claim.request_id}") as beside_it:
            lines = beside_it.iter_lines()
            for _ in range(4):  # so the other, which began before, has had two
                while next(lines) != ": waiting":
                    pass
            own_worker.finish(claim, "b")
        assert reading.result() == "ab"


def test_an_error_in_a_stream(http: httpx2.Client, own_worker: HandWorker) -> None:
    """The last event is an error object, and nothing follows."""
    with opened(http, own_worker, PROMPT) as (reading, claim):
        reading.next()
        http.delete(reading.response.headers["X-Stream-Url"])
        own_worker.send(claim, "b")
        [(_, data)] = reading.rest()
    assert data["error"]["code"] == "cancelled"


def test_a_deadline_that_cuts_an_answer(http: httpx2.Client, own_worker: HandWorker) -> None:
    """What has begun is an answer, and ends like one that was too long."""
    with opened(http, own_worker, {**PROMPT, "deadline_ms": 60000}) as (reading, claim):
        own_worker.send(claim, "b", FinishReason.EXPIRED)
        frames = reading.rest()
    assert texts_of(frames) == "ab"
    assert frames[-2][1]["choices"][0]["finish_reason"] == "length"


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


async def test_the_application_streams_behind_any_server(redis_url: str) -> None:
    """Also behind one that does not know how to write a piece at once."""
    app = create_app(GatewaySettings(redis_url=redis_url))
    async with (
        app.router.lifespan_context(app),
        running_worker(redis_url),
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app), base_url="http://localhost", timeout=None
        ) as http,
    ):
        answer = await http.post("/v1/completions", json={**PROMPT, "max_tokens": 5, "seed": 3})
        assert texts_of(list(read_frames(answer))) == model_free_worker.text_of(3, 5)
