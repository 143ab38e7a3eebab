"""Reads of large answers: they hold nobody up, and count towards their caller's rate."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import httpx2
import pytest

from promptq.producer.apis.responses.input_items import read_items
from promptq.producer.apis.responses.response_records import ResponseRecords
from promptq.producer.gateway.app import create_app
from promptq.producer.settings.gateway import GatewaySettings
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.claims import Claim
from promptq.shared.protocol.events import TokenLogprob, TopLogprob
from promptq.shared.protocol.request import FinishReason, Request
from tests.producer.gateway.living import LiveGateway, bearer, make_key
from tests.producer.playing import KEYS, HandWorker

TOP = [TopLogprob(token_id=it, logprob=-it, token=f" word{it}") for it in range(20)]
MANY = [TokenLogprob(token_id=1, logprob=-0.5, rank=1, top=TOP, token=" word1")] * 300
"""Of one event. Five of them are 2 MB of an answer."""
MESSAGES = [{"role": "user", "content": "Hi"}]


OF_PROMPT: dict[str, Any] = {
    "prompt_logprobs": [None, *MANY * 5],
    "prompt_texts": [" word1"] * (5 * len(MANY) + 1),
}


async def answered_by(
    worker: HandWorker, calling: Awaitable[Any], **of_prompt: Any
) -> tuple[Any, Claim]:
    """Returns the gateway's answer to a call whose request gets many log-probabilities.

    The log-probabilities of the prompt are in one event, which is also the last.
    """
    call = asyncio.ensure_future(calling)
    claim = await asyncio.to_thread(worker.take_next)
    if of_prompt:
        worker.send(claim, "x", FinishReason.LENGTH, **of_prompt)
    else:
        for _ in range(5):
            worker.send(claim, "x" * len(MANY), logprobs=MANY)
        worker.finish(claim)
    return await call, claim


async def largest_part(
    read: Callable[[], Awaitable[httpx2.Response]], least: int = 400_000
) -> float:
    """The part of a read's CPU time that the event loop spent on its largest piece.

    The smaller one of two reads, as the machine may be busy during one of them.
    """
    return min([await largest_part_of(read(), least) for _ in range(2)])


async def largest_part_of(read: Awaitable[httpx2.Response], least: int) -> float:
    pieces, answer = await pieces_of(read)
    assert len(answer.content) > least
    return max(pieces) / sum(pieces)


async def largest_piece(read: Awaitable[httpx2.Response]) -> float:
    """In seconds of CPU."""
    pieces, _ = await pieces_of(read)
    return max(pieces)


async def pieces_of(read: Awaitable[httpx2.Response]) -> tuple[list[float], httpx2.Response]:
    """The seconds of CPU of each round of the event loop, and the answer."""
    selector = cast(Any, asyncio.get_running_loop())._selector
    select, pieces, before = selector.select, list[float](), time.thread_time()

    def select_between(timeout: float | None) -> Any:
        nonlocal before
        pieces.append(time.thread_time() - before)
        found = select(timeout)
        before = time.thread_time()
        return found

    selector.select = select_between
    try:
        answer = await read
    finally:
        del selector.select
    pieces.append(time.thread_time() - before)
    assert answer.status_code == 200
    return pieces, answer


@pytest.fixture
def no_collector() -> Iterator[None]:
    """A collection goes through all objects of the test process, which are many more."""
    gc.disable()
    yield
    gc.enable()


@asynccontextmanager
async def http_of_gateway(redis_url: str) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a gateway on this event loop."""
    app = create_app(GatewaySettings(redis_url=redis_url))
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as http,
    ):
        yield http


@pytest.mark.usefixtures("no_collector")
async def test_the_event_loop_reads_large_answers_in_small_pieces(
    redis_url: str, own_worker: HandWorker
) -> None:
    """Whole and streamed, from the log, from the folded result, and from what is kept."""
    found: dict[str, float] = {}
    async with http_of_gateway(redis_url) as http:
        include = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
        response = {"input": "Hi", "background": True, **include}
        made, _ = await answered_by(own_worker, http.post("/v1/responses", json=response))
        address = f"/v1/responses/{made.json()['id']}"
        for name in ("log", "kept"):
            found[f"response, {name}"] = await largest_part(partial(http.get, address))
            stream = f"{address}?stream=true"
            found[f"its stream, {name}"] = await largest_part(partial(http.get, stream))
        chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}
        text = {"prompt": "Hi", "logprobs": 20}
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
            keyed = {**body, "idempotency_key": path}
            _, claim = await answered_by(own_worker, http.post(path, json=keyed))
            stream = f"/v1/streams/{claim.request_id}"
            for name in ("log", "folded"):
                found[f"{path}, {name}"] = await largest_part(partial(http.post, path, json=keyed))
                found[f"its stream, {path}, {name}"] = await largest_part(partial(http.get, stream))
                own_worker.fold_now(claim.request_id)
    assert max(found.values()) < 0.3, found


@pytest.mark.usefixtures("no_collector")
async def test_the_log_probabilities_of_a_long_prompt_are_read_in_pieces(
    redis_url: str, own_worker: HandWorker
) -> None:
    """All of it is one event. It is read, written and freed in small pieces."""
    found: dict[str, float] = {}
    calls: dict[str, tuple[dict[str, Any], int]] = {
        "/v1/chat/completions": ({"messages": MESSAGES, "prompt_logprobs": 20}, 0),
        "/v1/completions": ({"prompt": [1, 2], "echo": True, "logprobs": 20}, 400_000),
    }
    async with http_of_gateway(redis_url) as http:
        for path, (body, least) in calls.items():
            keyed = {**body, "max_tokens": 1, "idempotency_key": path}
            _, claim = await answered_by(own_worker, http.post(path, json=keyed), **OF_PROMPT)
            stream = f"/v1/streams/{claim.request_id}?echo=1"
            for name in ("log", "folded"):
                found[f"{path}, {name}"] = await largest_part(partial(http.post, path, json=keyed))
                found[f"its stream, {path}, {name}"] = await largest_part(
                    partial(http.get, stream), least
                )
                own_worker.fold_now(claim.request_id)
    assert max(found.values()) < 0.08, found


@pytest.mark.usefixtures("no_collector")
async def test_so_are_pages_and_forks_of_large_answers(
    redis_url: str, own_worker: HandWorker
) -> None:
    """Of what is in the log, in the folded result, and in the last event."""
    found: dict[str, float] = {}
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20}
    async with http_of_gateway(redis_url) as http:
        for of_prompt, least in (({}, 400_000), (OF_PROMPT, 0)):
            call = http.post("/v1/chat/completions", json=chat)
            _, claim = await answered_by(own_worker, call, **of_prompt)
            page = "/dashboard/api/live/request"
            for name in ("log", "folded"):
                read = partial(http.get, page, params={"id": claim.request_id})
                found[f"a page, {least}, {name}"] = await largest_part(read, least)
                with own_worker.finishing(["a", "a"]):
                    read = partial(
                        http.post, f"/v1/streams/{claim.request_id}/fork", json={"at": 1}
                    )
                    found[f"a fork, {least}, {name}"] = await largest_part(read, 0)
                own_worker.fold_now(claim.request_id)
    for what, part in found.items():  # a fork computes less beside its largest piece
        assert part < (0.14 if "fork" in what else 0.1), found


KINDS = ["string", "null"]
PROPERTIES = {f"p{number}": {"type": KINDS} for number in range(4000)}
MANY_PARAMETERS = {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}


@pytest.mark.usefixtures("no_collector")
async def test_responses_that_wait_are_looked_at_without_their_tools(
    redis_url: str, own_worker: HandWorker
) -> None:
    """A gateway looks at all of them every few seconds. A read needs their parameters, and takes
    longer for one response than the look for all."""
    body = {"input": "Hi", "background": True, "tools": [{"type": "function", **MANY_PARAMETERS}]}
    async with http_of_gateway(redis_url) as http:
        ids = []
        for _ in range(2):
            made = await http.post("/v1/responses", json=body, timeout=60)
            assert made.status_code == 200, made.text
            ids.append(made.json()["id"])
        read = await largest_piece(http.get(f"/v1/responses/{ids[0]}"))
        app: Any = http._transport
        stored = ResponseRecords(app.app.state.gateway).stored
        before = time.thread_time()
        found = await stored.unfinished(-60_000, 200)
        assert time.thread_time() - before < read
        assert sorted(response.call.id for response in found) == ids


METADATA = {str(number): [number] for number in range(60_000)}
LARGE_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "metadata": ("/v1/chat/completions", {"messages": MESSAGES, "metadata": METADATA}),
    "ids": ("/v1/completions", {"prompt": [1] * 500_000}),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", LARGE_CALLS)
async def test_a_large_prompt_is_read_in_another_process_each_time(
    redis_url: str, own_worker: HandWorker, kind: str
) -> None:
    """Reading it takes longer than any piece of the event loop, when the stream is read again and
    when it is cancelled."""
    path, body = LARGE_CALLS[kind]
    async with http_of_gateway(redis_url) as http:
        _, claim = await answered_by(own_worker, http.post(path, json=body))
        before = time.thread_time()
        Request.parse(own_worker.redis.hget(KEYS.request(claim.request_id), "payload"))
        needed = time.thread_time() - before
        address = f"/v1/streams/{claim.request_id}"
        for read in (http.get, http.delete, partial(http.get, params={"echo": 1})):
            largest = min([await largest_piece(read(address)) for _ in range(2)])
            assert largest < needed / 3


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/responses/resp_x", {}),
        ("/v1/responses/resp_x/input_items", {}),
        ("/v1/streams/cmpl-x", {}),
        ("/v1/files", {}),
        ("/v1/files/file-x/content", {}),
        ("/v1/batches", {}),
        ("/v1/completions", {"Last-Event-ID": "cmpl-x/0-0"}),
    ],
)
def test_reads_are_counted(
    gateway: LiveGateway, redis_url: str, path: str, headers: dict[str, str]
) -> None:
    secret = make_key(redis_url, "slow", requests_per_minute=1)
    with httpx2.Client(base_url=gateway.url, headers=bearer(secret) | headers, timeout=30) as http:
        ask = http.post if headers else http.get
        assert ask(path).status_code in (200, 404)
        assert ask(path).status_code == 429


def test_a_cancel_of_what_is_over_counts_as_a_read(
    gateway: LiveGateway, redis_url: str, own_worker: HandWorker
) -> None:
    """Its answer is the whole response. While the response runs, a cancel does not count."""
    headers = bearer(make_key(redis_url, "slow", requests_per_minute=3))
    with httpx2.Client(base_url=gateway.url, headers=headers, timeout=30) as http:
        made = http.post("/v1/responses", json={"input": "Hi", "background": True})
        address = f"/v1/responses/{made.json()['id']}"
        claim = own_worker.take()
        for _ in range(3):
            assert http.post(f"{address}/cancel").status_code == 200
        own_worker.finish(claim, "a")
        assert http.get(address).json()["status"] == "cancelled"
        assert http.post(f"{address}/cancel").status_code == 200
        assert http.post(f"{address}/cancel").status_code == 429


def test_a_response_has_a_bounded_number_of_items() -> None:
    """Each read of its input looks at all of them. Reasoning counts as no message."""
    items = [{"type": "reasoning"}] * 16_384
    assert len(read_items(items, "x")) == 16_384
    with pytest.raises(InvalidRequestError, match="input: 16385 items are more than the 16384"):
        read_items([*items, {"type": "reasoning"}], "x")
