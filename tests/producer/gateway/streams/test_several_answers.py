"""Several answers to one call, in one stream."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx2
import pytest
from openai import OpenAI

from promptq.shared.protocol.claims import Claim
from promptq.shared.protocol.events import ErrorInfo, TokenEvent
from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.rows import Row
from tests.producer.gateway.living import LiveGateway
from tests.producer.gateway.played import (
    CHAT,
    PROMPT,
    continued,
    is_cancelled,
    opened,
    read_frames,
    texts_of,
)
from tests.producer.playing import KEYS, HandWorker
from tests.support.waiting import until


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
        first, second = own_worker.take_next(), own_worker.take_next()
        for claim, texts in ((second, "xy"), (first, "ab")):
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
        first, second = own_worker.take_next(), own_worker.take_next()
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
        claims = [own_worker.take_next() for _ in range(2)]
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


@pytest.mark.matrix(2)
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
