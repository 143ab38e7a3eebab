"""A stream sends more than text: signs of life, errors, and its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import redis
from openai import AsyncOpenAI, OpenAI

from promptq.producer.gateway.app import create_app
from promptq.producer.settings.gateway import GatewaySettings
from promptq.shared.protocol.request import FinishReason
from promptq.shared.queue.request_queue import new_request_id
from tests.producer.gateway.living import LiveGateway, live_gateway
from tests.producer.gateway.played import PROMPT, opened, read_frames, texts_of
from tests.producer.playing import HandWorker
from tests.support.model_free import running_worker, text_of
from tests.support.requests import put
from tests.support.roles import as_role
from tests.support.servers import embedded_server


def test_a_stream_that_waits_shows_its_place(
    start_gateway: Callable[..., LiveGateway], own_worker: HandWorker
) -> None:
    """After a while the status is sent without a token, and then comments."""
    put(own_worker.queue, "first")
    gateway = start_gateway(http_header_seconds=0.05, http_keepalive_seconds=0.05)
    with (
        httpx2.Client(base_url=gateway.url, timeout=30) as http,
        http.stream("POST", "/v1/completions", json=PROMPT) as response,
    ):
        lines = response.iter_lines()
        for _ in range(2):
            assert next(lines).startswith(": waiting: 1 request waits in front, with about ")
        place = http.get(f"{response.headers['X-Stream-Url']}/place").json()
        assert place["object"] == "place"
        assert place["id"] == response.headers["X-Request-Id"]
        assert (place["state"], place["in_front"], place["at_most"]) == ("waiting", 1, False)
        assert (place["start_p50_ms"], place["because"]) == (None, "no worker is alive")
        own_worker.take()
        while not next(lines).startswith(": waiting: next; the start is unknown: no worker"):
            pass
        claim = own_worker.take()
        own_worker.finish(claim, "a")
        assert "[DONE]" in "".join(lines)
        place = http.get(f"/v1/streams/{place['id']}/place").json()
        assert (place["state"], place["because"]) == ("completed", "the request has ended")
        unknown = http.get(f"/v1/streams/cmpl-{new_request_id()}/place")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi", "stream": True}),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 4,
                "stream": True,
                "model": "",
            },
        ),
    ],
    ids=["responses", "messages"],
)
def test_streams_of_other_endpoints_show_their_places(
    start_gateway: Callable[..., LiveGateway],
    own_worker: HandWorker,
    path: str,
    body: dict[str, object],
) -> None:
    put(own_worker.queue, "first")
    gateway = start_gateway(http_header_seconds=0.05, http_keepalive_seconds=0.05)
    with (
        httpx2.Client(base_url=gateway.url, timeout=30) as http,
        http.stream("POST", path, json=body) as response,
    ):
        lines = response.iter_lines()
        while not next(lines).startswith(": waiting: 1 request waits in front"):
            pass
        own_worker.take()
        while not next(lines).startswith(": waiting: next; the start is unknown: no worker"):
            pass
        own_worker.finish(own_worker.take(), "a")
        assert "event: error" not in [*lines]


def test_a_stream_has_events_of_the_queue_for_a_client_that_wants_them(
    start_gateway: Callable[..., LiveGateway], own_worker: HandWorker
) -> None:
    gateway = start_gateway(http_header_seconds=0.05, http_keepalive_seconds=0.05)
    headers = {"X-Queue-Events": "1"}
    with (
        httpx2.Client(base_url=gateway.url, timeout=30) as http,
        http.stream(
            "POST",
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Hi"}], "stream": True},
            headers=headers,
        ) as response,
    ):
        lines = response.iter_lines()
        for _ in range(2):
            event, data, blank = (next(lines) for _ in range(3))
            assert (event, blank) == ("event: queue", "")
            place = json.loads(data.removeprefix("data: "))
            assert place["id"] == response.headers["X-Request-Id"]
            assert place["in_front"] == 0
        claim = own_worker.take()
        while next(lines) != ": waiting":  # no event, as the request no longer waits
            pass
        own_worker.finish(claim, "a")
        assert "event: queue" not in [*lines]


def test_a_comment_comes_also_where_the_gateways_user_may_not_read_places() -> None:
    """An earlier release made the gateway's user, by `promptq acl`."""
    with embedded_server() as url, redis.Redis.from_url(url) as default:
        default.execute_command("ACL", "SETUSER", "gateway", "-zrank")
        often = {"http_header_seconds": 0.05, "http_keepalive_seconds": 0.05}
        with (
            live_gateway(as_role("gateway", url), **often) as gateway,
            httpx2.Client(base_url=gateway.url, timeout=30) as http,
            http.stream("POST", "/v1/completions", json=PROMPT) as response,
        ):
            assert next(response.iter_lines()) == ": waiting"


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
        claim = own_worker.take_next()
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
    """An answer that has begun ends like one that was too long."""
    with opened(http, own_worker, {**PROMPT, "deadline_ms": 60000}) as (reading, claim):
        own_worker.send(claim, "b", FinishReason.EXPIRED)
        frames = reading.rest()
    assert texts_of(frames) == "ab"
    assert frames[-2][1]["choices"][0]["finish_reason"] == "length"


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
        assert texts_of(list(read_frames(answer))) == text_of(3, 5)
