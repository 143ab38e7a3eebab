"""Forks over HTTP: with the shipped model, and for callers with keys."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from openai import OpenAI

from promptq import Client
from tests.producer.gateway.living import LiveGateway, bearer, make_key
from tests.producer.gateway.played import read_frames, texts_of
from tests.producer.playing import HandWorker

CHAT: Any = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
AT = 6


@pytest.fixture
def url_of(stories: OpenAI, stories_gateway: LiveGateway) -> str:
    """The address of the fork of a chat that ended."""
    raw = stories.chat.completions.with_raw_response.create(
        model="", **CHAT, temperature=0, max_tokens=16, logprobs=True, top_logprobs=2
    )
    return f"{stories_gateway.url}{raw.headers['X-Stream-Url']}/fork"


def content_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_a_fork_is_answered_like_its_source(url_of: str, stories: OpenAI) -> None:
    """With the fields of the source, but for those that are given: in the body or in a header."""
    source_url = url_of.removesuffix("/fork")
    with httpx2.stream("GET", source_url, timeout=30) as response:
        told = texts_of(list(read_frames(response)))
    whole = httpx2.post(url_of, timeout=30, json={"at": AT, "max_completion_tokens": 10})
    assert content_of(whole) == told
    body = whole.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["usage"]["completion_tokens"] == 16
    assert len(body["choices"][0]["logprobs"]["content"]) == 10
    assert whole.headers["X-Forked-From"] == f"{AT} {source_url.rpartition('/')[2]}"
    fork = {"at": AT, "append": " Oh no", "stream": True, "max_tokens": 4, "n": 2, "seed": 3}
    with httpx2.stream("POST", url_of, timeout=30, json=fork) as response:
        assert response.headers["X-Forked-From"].startswith(f"{AT} ")
        frames = list(read_frames(response))
    for index in range(2):
        chunks = [it["choices"][0] for _, it in frames if it != "[DONE]"]
        text = "".join(it["delta"].get("content", "") for it in chunks if it["index"] == index)
        assert " Oh no" in text
        assert told.startswith(text[: text.index(" Oh no")])
    again = httpx2.post(
        f"{source_url.rpartition('/')[0]}/{frames[0][1]['id']}/fork",
        timeout=30,
        json={"choice": 1, "at": 0, "logprobs": False, "max_tokens": 2, "temperature": 0},
    )
    assert told.startswith(content_of(again))
    assert again.json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"at": 17}, "at", "has 16 tokens so far, so it can be forked at 0 to 16, not at 17"),
        ({"at": -1}, "at", "at: "),
        ({"at": True}, "at", "at: "),
        ({"append": 3}, "append", "append: "),
        ({"prompt": "Hi"}, "prompt", "prompt: cannot be changed"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: "),
        ({"tempreature": 0}, "tempreature", "do you mean temperature?"),
        ([], None, "not a JSON object"),
    ],
)
def test_a_wrong_body(url_of: str, body: Any, param: str | None, message: str) -> None:
    answer = httpx2.post(url_of, timeout=30, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_call_that_is_no_fork(url_of: str) -> None:
    """Such as one that would resume another stream, or whose body is too large."""
    resumed = httpx2.post(
        url_of, json={}, headers={"Last-Event-ID": "chatcmpl-1;0-0"}, timeout=None
    )
    assert (resumed.status_code, resumed.json()["error"]["param"]) == (400, "Last-Event-ID")
    large = httpx2.post(url_of, json={"append": "a" * 70_000}, timeout=None)
    assert large.status_code == 413
    unknown = httpx2.post(url_of.replace("/fork", "0/fork"), json={}, timeout=None)
    assert unknown.status_code == 404


def test_only_who_may_read_a_stream_may_fork_it(
    http: httpx2.Client, redis_url: str, own_worker: HandWorker
) -> None:
    """To others it is unknown, as when they read it. The fork is its caller's."""
    keys = {
        name: bearer(make_key(redis_url, name, **fields))
        for name, fields in {
            "mine": {"tenant": "us", "requests_per_minute": 3},
            "theirs": {"tenant": "them"},
            "files": {"tenant": "us", "scopes": ["files"]},
            "boss": {"is_admin": True},
        }.items()
    }
    with own_worker.finishing(["abc"]):
        made = http.post("/v1/completions", json={"prompt": "Hi"}, headers=keys["mine"])
    path = f"{made.headers['X-Stream-Url']}/fork"
    for name, status in (("theirs", 404), ("files", 403)):
        assert http.post(path, json={"at": 1}, headers=keys[name]).status_code == status
    read = http.get(made.headers["X-Stream-Url"], headers=keys["theirs"])
    forked = http.post(path, json={"at": 1}, headers=keys["theirs"])
    assert forked.json() == read.json()
    for name, tenant in (("mine", "us"), ("boss", "us")):
        with own_worker.finishing(["abc"]):
            fork = http.post(path, json={"at": 2, "append": "z"}, headers=keys[name])
        request_id = fork.headers["X-Request-Id"]
        payload = own_worker.payload(request_id)
        assert payload["output_prefix"]["text"] == "z"
        assert len(payload["output_prefix"]["token_ids"]) == 2
        assert "seed" not in payload
        with Client(redis_url) as client:
            timeline = client.timeline(request_id)
        assert (timeline.forked_at, timeline.tenant) == (2, tenant)
        assert timeline.forked_from == made.headers["X-Request-Id"]
    assert http.post(path, json={"at": 9}, headers=keys["mine"]).status_code == 400
    assert http.post(path, json={"at": 1}, headers=keys["mine"]).status_code == 429


def test_a_large_source(http: httpx2.Client, own_worker: HandWorker) -> None:
    """Its payload is read beside the event loop, like a large body."""
    prompt = "a" * 100_000
    with own_worker.finishing(["abc"]):
        made = http.post("/v1/completions", json={"prompt": prompt})
    with own_worker.finishing(["abc"]):
        fork = http.post(f"{made.headers['X-Stream-Url']}/fork", json={"at": 1}, timeout=60)
    payload = own_worker.payload(fork.headers["X-Request-Id"])
    assert payload["prompt"] == prompt
    assert payload["output_prefix"] == {"token_ids": [ord("a")]}


def test_a_fork_of_a_message_is_a_message(http: httpx2.Client, own_worker: HandWorker) -> None:
    """Whole and streamed, and when it is read again. It repeats its first tokens."""
    call = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    with own_worker.finishing(["abc"]):
        made = http.post("/v1/messages", json=call)
    path = f"{made.headers['X-Stream-Url']}/fork"
    fields = {"at": 2, "append": "x", "stop_sequences": ["y"], "max_tokens": 5}
    with own_worker.finishing(["abxd"]):
        fork = http.post(path, json=fields)
    assert fork.status_code == 200, fork.text
    body = fork.json()
    assert (body["type"], body["id"][:4], body["content"]) == ("message", "msg_", fork_text("abxd"))
    payload = own_worker.payload(body["id"])
    assert (payload["stop"], payload["max_tokens"]) == (["y"], 5)
    assert "text_delta" in http.get(fork.headers["X-Stream-Url"]).text
    with own_worker.finishing(["abc"]):
        streamed = http.post(path, json={"at": 1, "stream": True})
    assert streamed.text.startswith("event: message_start")
    refused = http.post(path, json={"at": 1, "n": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def fork_text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "citations": None}]
