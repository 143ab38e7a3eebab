"""Pictures in the calls of all APIs: how they reach the queue, and how they are refused."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from promptq.producer.batch_store.files import FileStore
from promptq.producer.calls.caller import Caller
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.picture_urls import PictureFetcher
from promptq.producer.calls.rate_costs import rates_of
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.pictures import data_url, picture_part
from promptq.shared.protocol.request import Request
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import scripts
from tests.producer.gateway.living import LiveGateway, bearer, error_of, make_key
from tests.producer.gateway.pictures_server import LARGE_PICTURE, PICTURE, pictures_server
from tests.producer.gateway.played import anthropic_of, message_of, openai_of, response_of, worked
from tests.producer.playing import KEYS, HandWorker
from tests.support.waiting import until

CALLER = Caller(name="k", tokens_per_minute=10**6)
URL = data_url(PICTURE)
LARGE = data_url(LARGE_PICTURE)
TEXT = {"type": "text", "text": "What is this?"}


def source(url: str) -> dict[str, Any]:
    header, data = url.split(";base64,")
    return {"type": "base64", "media_type": header.removeprefix("data:"), "data": data}


@pytest.mark.parametrize("url", [URL, LARGE], ids=["small", "large"])
def test_chats_responses_and_messages_have_pictures(
    gateway: LiveGateway, own_worker: HandWorker, url: str
) -> None:
    own: Any = [picture_part(url), TEXT]
    with openai_of(gateway) as client:
        _, chat = worked(
            own_worker,
            lambda: client.chat.completions.create(
                model="", messages=[{"role": "user", "content": own}]
            ),
            lambda claim: own_worker.finish(claim, "Hi"),
        )
        parts = [{"type": "input_image", "image_url": url}, {**TEXT, "type": "input_text"}]
        _, response = response_of(client, own_worker, input=[{"role": "user", "content": parts}])
    blocks = [{"type": "image", "source": source(url)}, TEXT]
    with anthropic_of(gateway) as other:
        _, message = message_of(other, own_worker, messages=[{"role": "user", "content": blocks}])
    wanted = [{"role": "user", "content": own}]
    assert chat["messages"] == response["messages"] == message["messages"] == wanted


def test_the_choices_of_a_call_and_its_forks_share_one_stored_picture(
    gateway: LiveGateway, own_worker: HandWorker, http: httpx2.Client
) -> None:
    messages = [{"role": "user", "content": [picture_part(LARGE), TEXT]}]
    body = {"messages": messages, "n": 2, "detach": True, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        completion_id = answer.headers["x-request-id"]
    claims = [own_worker.take_next() for _ in range(2)]
    [key] = own_worker.redis.keys(f"{KEYS.prefix}picture:*")
    for claim in claims:
        assert json.loads(claim.payload)["messages"] == messages
        assert LARGE not in json.dumps(own_worker.payload(claim.request_id))
        own_worker.finish(claim, "Hi")
    assert own_worker.redis.pttl(key) > 0
    fork = {"choice": 1, "at": 1, "stream": True, "detach": True}
    with http.stream("POST", f"/v1/streams/{completion_id}/fork", json=fork) as answer:
        assert answer.status_code == 200
        claim = own_worker.take_next()
        own_worker.finish(claim, "Ho")
    assert json.loads(claim.payload)["messages"] == messages
    assert own_worker.redis.keys(f"{KEYS.prefix}picture:*") == [key]


def test_blocks_of_a_tool_and_successive_turns_keep_their_pictures(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    image = {"type": "image", "source": source(URL)}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [image]}
    turns = [
        {"role": "user", "content": "Look"},
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, TEXT]},
    ]
    with anthropic_of(gateway) as client:
        _, payload = message_of(client, own_worker, messages=turns)
    first, _, tool, last = payload["messages"]
    assert first["content"] == [{"type": "text", "text": "Look\n\n"}, picture_part(URL)]
    assert tool["content"] == [picture_part(URL)]
    assert last["content"] == TEXT["text"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [picture_part(URL)]}]},
            "messages",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
            "input",
        ),
    ],
)
def test_a_model_without_pictures_refuses_before_the_queue(
    http: httpx2.Client, own_worker: HandWorker, path: str, body: dict[str, Any], param: str
) -> None:
    own_worker.redis.hset(KEYS.model, "model", "m")
    own_worker.queue.run(scripts.heartbeat(WorkerStats(worker_id="w", refused="pictures"), 60_000))
    until(lambda: "pictures" in http.get("/v1/models").text)
    answer = http.post(f"/v1/{path}", json=body)
    assert error_of(answer) == (400, "unsupported")
    assert answer.json()["error"]["param"] == param
    assert own_worker.redis.zcard(KEYS.pending) == 0


def test_tokens_are_estimated_from_the_size_in_pixels() -> None:
    fields = {"messages": [{"role": "user", "content": [picture_part(LARGE)]}]}
    (rate,) = rates_of(CALLER, [fields], Request.build(fields).pictures)
    assert 400 * 400 // 28**2 < rate.amount < 400 * 400 // 28**2 + 60


def test_a_rate_of_tokens_limits_the_bytes_of_pictures(
    redis_url: str, http: httpx2.Client, own_worker: HandWorker
) -> None:
    """Whatever size in pixels a picture states."""
    headers = bearer(make_key(redis_url, "few", tokens_per_minute=1000))
    padded = data_url(PICTURE + bytes(5_000_000))
    body = {"messages": [{"role": "user", "content": [picture_part(padded)]}], "detach": True}
    answer = http.post("/v1/chat/completions", json=body, headers=headers)
    assert error_of(answer) == (429, "rate_limit_exceeded")
    assert re.search(r"needs 16\d\d tokens, and .* 1000 tokens a minute", answer.text)
    assert own_worker.redis.keys(f"{KEYS.prefix}picture:*") == []
    assert own_worker.redis.zcard(KEYS.pending) == 0


async def test_pictures_are_fetched_without_redirects_and_within_limits(tmp_path: Path) -> None:
    calls: list[str] = []
    fetcher = PictureFetcher(FileStore(tmp_path))
    with pictures_server(calls) as base:
        found = await fetcher.fetch([f"{base}/picture"], "input", CALLER, allow_private=True)
        assert found == {f"{base}/picture": URL}
        for path, why in (
            ("moved", "the server redirects, which is not followed"),
            ("none", "the server answered 404"),
            ("page", "the picture is no PNG, JPEG, GIF or WebP"),
            ("huge", "the pictures have more than 6291456 bytes in all"),
            ("x" * 2048, "the URL is longer than 2048 characters"),
        ):
            with pytest.raises(InvalidRequestError, match=f"^input: the picture at .*: {why}$"):
                await fetcher.fetch([f"{base}/{path}"], "input", CALLER, allow_private=True)
        assert calls == ["/picture", "/moved", "/none", "/page", "/huge"]
    fetcher.close()


@pytest.mark.parametrize("is_large", [False, True])
def test_a_url_in_a_private_network_is_never_called(http: httpx2.Client, is_large: bool) -> None:
    calls: list[str] = []
    with pictures_server(calls) as base:
        url = base.replace("127.0.0.1", "localhost") + "/picture"
        content = [picture_part(url), {"type": "text", "text": "x" * (100_000 * is_large)}]
        answer = http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]}
        )
        assert error_of(answer) == (400, "invalid_request")
        assert (
            "localhost is in a private network, at 127.0.0.1" in answer.json()["error"]["message"]
        )
        body = {"messages": [{"role": "user", "content": [picture_part(url)]}]}
        for wrong in (body, {"messages": 5}, {"messages": [5]}, {"messages": [{"content": 5}]}):
            assert error_of(http.post("/tokenize", json=wrong)) == (400, "invalid_request")
    assert calls == []


@pytest.mark.parametrize("text", ["", "x" * 100_000], ids=["small", "large"])
def test_a_fetched_picture_becomes_a_data_url_in_the_payload(
    gateway: LiveGateway, own_worker: HandWorker, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The rule about addresses is lifted in the gateway's process, which is this one."""
    monkeypatch.setattr("promptq.producer.calls.safe_http.is_public", lambda _: True)
    with pictures_server([]) as base, openai_of(gateway) as client:
        own: Any = [picture_part(f"{base}/picture"), {"type": "text", "text": f"a{text}"}]
        _, payload = worked(
            own_worker,
            lambda: client.chat.completions.create(
                model="", messages=[{"role": "user", "content": own}]
            ),
            lambda claim: own_worker.finish(claim, "Hi"),
        )
    assert payload["messages"][0]["content"] == [picture_part(URL), own[1]]


def test_an_uploaded_file_becomes_a_data_url_in_the_payload(
    gateway: LiveGateway, own_worker: HandWorker, http: httpx2.Client
) -> None:
    with openai_of(gateway) as client, anthropic_of(gateway) as other:
        file_id = client.files.create(file=("a.png", PICTURE), purpose="vision").id
        part: Any = {"type": "input_image", "file_id": file_id, "detail": "auto"}
        _, response = response_of(client, own_worker, input=[{"role": "user", "content": [part]}])
        block = {"type": "image", "source": {"type": "file", "file_id": file_id}}
        turns = [{"role": "user", "content": [block]}]
        _, message = message_of(other, own_worker, messages=turns)
    wanted = [{"role": "user", "content": [picture_part(URL)]}]
    assert response["messages"] == message["messages"] == wanted
    unknown = {**part, "file_id": f"file-{'0' * 32}"}
    answer = http.post("/v1/responses", json={"input": [{"role": "user", "content": [unknown]}]})
    assert error_of(answer) == (400, "invalid_request")
    assert answer.json()["error"]["param"] == "input"
    assert "no file" in answer.json()["error"]["message"]


async def test_files_are_those_of_the_caller_s_tenant_and_need_the_scope(tmp_path: Path) -> None:
    files = FileStore(tmp_path)
    fetcher = PictureFetcher(files)
    stored = files.add(io.BytesIO(PICTURE), filename="a.png", purpose="vision", tenant="a")
    owner = Caller(name="k", tenant="a")
    assert await fetcher.fetch([stored.id], "messages", owner) == {stored.id: URL}
    with pytest.raises(InvalidRequestError, match="no file"):
        await fetcher.fetch([stored.id], "messages", owner.model_copy(update={"tenant": "b"}))
    with pytest.raises(ApiError, match="it needs the scope 'files'"):
        await fetcher.fetch(
            [stored.id], "messages", owner.model_copy(update={"scopes": ("completions",)})
        )
    fetcher.close()
