"""The dashboard's page and the data on it. Its actions are in actions.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import cache, partial
from importlib import resources
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from promptq.producer.admin.timeline import Timeline
from promptq.producer.calls.errors import ApiError, as_api_error
from promptq.producer.calls.logprobs import free_logprobs
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.clients.connecting import explained
from promptq.producer.gateway.dashboard import request_search
from promptq.producer.gateway.dashboard.page_stream import event_response, message
from promptq.producer.gateway.dashboard.poller import Poller, Topic
from promptq.producer.gateway.dashboard.request_search import FoundRequests
from promptq.producer.http.auth import ThisAdmin
from promptq.producer.http.state import Gateway, ThisGateway
from promptq.shared.errors import InvalidRequestError, PromptqError, RequestNotFoundError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.keys import check_request_id
from promptq.shared.protocol.worker_stats import SAMPLE_MS
from promptq.shared.queue import lookups
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.tasks import end
from promptq.shared.runtime.turns import Work

router = APIRouter(include_in_schema=False)

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FOLDERS = ("", "pages/", "shared/")
_HEADERS = {
    # The page may load only files of this gateway, and has no scripts or styles inside it. No
    # text is ever taken for HTML: browsers that know trusted types refuse that.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
TIMELINE_SECONDS = 1.0
"""Seconds between two checks whether a request's timeline has changed."""

MAX_SHOWN_PAYLOAD = 65_536
"""The most characters of a payload that the page shows. A longer payload is cut, because people
would not read all of it."""

MAX_SHOWN_DEAD = 100
"""The most dead letters on the page. One more id is read, to know whether there are more."""

RequestId = Annotated[str, Query(alias="id")]


async def shown_queue(gateway: ThisGateway, queue: str = "") -> ServedQueue:
    """Returns the queue in the query; without one, the gateway's own queue. Raises ApiError 404."""
    return await gateway.queues.named(queue)


ThisQueue = Annotated[ServedQueue, Depends(shown_queue)]
"""Type of a route's parameter that gets the queue of its page."""


class _Dead(BaseModel):
    ids: list[str]


@cache
def _files() -> dict[str, bytes]:
    static = resources.files("promptq.producer.gateway.dashboard") / "static"
    return {
        f"{folder}{file.name}": file.read_bytes()
        for folder in _FOLDERS
        for file in (static / folder).iterdir()
        if file.name.rpartition(".")[2] in _TYPES
    }


@router.get("/favicon.ico")
async def favicon() -> Response:
    """The page's icon, for pages of this gateway that name no icon."""
    return await file("icon.svg")


@router.get("/")
async def page() -> Response:
    """The dashboard's only page. It contains no data, so callers need no key."""
    return await file("index.html")


@router.get("/dashboard/files/{name:path}")
async def file(name: str) -> Response:
    """A script or style of the page."""
    content = _files().get(name)
    if content is None:
        raise ApiError(404, f"there is no file {name!r}")
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)


@router.get("/dashboard/api/caller")
async def caller(admin: ThisAdmin, gateway: ThisGateway) -> dict[str, object]:
    """Returns the caller's name and the queues, the gateway's own first."""
    views = await gateway.queues.views()
    queues = [{"name": served.name, "model": view.model} for served, view in views]
    return {"name": admin.name, "queues": queues}


@router.get("/dashboard/api/live/overview")
async def live_overview(
    request: Request, admin: ThisAdmin, gateway: ThisGateway, served: ThisQueue
) -> StreamingResponse:
    """Stream the samples of the last hour, then the overview once a second."""
    return event_response(request, gateway, _overview(served, _poller_of(request, gateway)))


@router.get("/dashboard/api/live/worker")
async def live_worker(
    request: Request,
    admin: ThisAdmin,
    gateway: ThisGateway,
    served: ThisQueue,
    worker_id: RequestId,
) -> StreamingResponse:
    """Stream a worker and its batch, once a second."""
    return _live(request, gateway, served, "worker", worker_id)


@router.get("/dashboard/api/live/request")
async def live_request(
    request: Request,
    admin: ThisAdmin,
    gateway: ThisGateway,
    served: ThisQueue,
    request_id: RequestId,
) -> StreamingResponse:
    """Stream a request's events from the first one on, and its timeline when it changes."""
    timeline = await served.client.timeline(check_request_id(request_id))
    return event_response(request, gateway, _request(served, request_id, timeline))


@router.get("/dashboard/api/live/requests")
async def live_requests(
    request: Request,
    admin: ThisAdmin,
    gateway: ThisGateway,
    served: ThisQueue,
    state: str,
    tenant: str = "",
) -> StreamingResponse:
    """Stream the first page of requests in a state that has a sorted set, once a second."""
    if state not in request_search.SETS:
        names = ", ".join(request_search.SETS)
        raise InvalidRequestError(f"state: {state[:80]!r} is not one of {names}", field="state")
    served.queue.keys.pending_of(tenant)  # raises an error for a wrong name
    return _live(request, gateway, served, "requests", state, tenant)


@router.get("/dashboard/api/live/dead")
async def live_dead(
    request: Request, admin: ThisAdmin, gateway: ThisGateway, served: ThisQueue
) -> StreamingResponse:
    """Stream the ids of the latest dead letters, once a second. The content of a dead letter never
    changes."""
    return _live(request, gateway, served, "dead")


@router.get("/dashboard/api/requests")
async def requests(
    admin: ThisAdmin,
    served: ThisQueue,
    state: str = "",
    tenant: str = "",
    prefix: str = "",
    cursor: str = "",
) -> FoundRequests:
    """Returns a page of requests, and a description of the search."""
    return await request_search.search(
        served.queue, state=state, tenant=tenant, prefix=prefix, cursor=cursor
    )


@router.get("/dashboard/api/dead")
async def dead_letters(
    admin: ThisAdmin, served: ThisQueue, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[dict[str, object]]:
    """List dead letters, the latest first. Long payloads are cut."""
    letters = await served.client.dead_letters(limit)
    return [{**letter.model_dump(), "payload": letter.payload[:4096]} for letter in letters]


def _poller_of(request: Request, gateway: Gateway) -> Poller:
    """Returns the poller of this gateway. It polls while at least one page is open."""
    state = request.app.state
    if not hasattr(state, "poller"):
        state.poller = Poller(partial(_read, gateway))
    poller: Poller = state.poller
    return poller


async def _read(gateway: Gateway, topic: Topic) -> str:
    """Returns the state of a topic as JSON. The first word of a topic is a queue's name."""
    name, *which = topic
    served = await gateway.queues.named(name)
    return await _as_of_now(served, await _value_of(served, which))


async def _value_of(served: ServedQueue, which: list[str]) -> BaseModel | None:
    match which:
        case ["overview"]:
            return await served.client.overview()
        case ["dead"]:
            return _Dead(ids=await served.client.dead_ids(MAX_SHOWN_DEAD + 1))
        case ["requests", state, tenant]:
            with explained(served.client.url):
                return await request_search.search(served.queue, state=state, tenant=tenant)
    try:
        return await served.client.worker(which[1])
    except RequestNotFoundError:
        return None


async def _as_of_now(served: ServedQueue, value: BaseModel | None) -> str:
    """Returns a value as JSON, with the server's time, because pages show how much time has
    passed."""
    with explained(served.client.url):
        now_ms = await served.queue.run(lookups.server_time_ms())
    text = "null" if value is None else value.model_dump_json()
    return f'{{"now":{now_ms},"value":{text}}}'


def _live(
    request: Request, gateway: Gateway, served: ServedQueue, *which: str
) -> StreamingResponse:
    topic = (served.name, *which)
    return event_response(request, gateway, _polled(_poller_of(request, gateway), topic))


async def _polled(poller: Poller, topic: Topic) -> AsyncGenerator[str, None]:
    """Yields a topic's samples as server-sent events. The events' name is the topic's second
    word."""
    async with aclosing(poller.watch(topic)) as samples:
        async for sample in samples:
            yield message("unreachable", "null") if sample is None else message(topic[1], sample)


async def _overview(served: ServedQueue, poller: Poller) -> AsyncGenerator[str, None]:
    with suppress(PromptqError):  # the next message says that the queue cannot be reached
        samples = await served.client.statistics()
        dumped = [sample.model_dump(mode="json") for sample in samples]
        yield message("history", json.dumps({"sample_ms": SAMPLE_MS, "samples": dumped}))
    async with aclosing(_polled(poller, (served.name, "overview"))) as messages:
        async for text in messages:
            yield text


async def _request(
    served: ServedQueue, request_id: str, timeline: Timeline
) -> AsyncGenerator[str, None]:
    """Yields a request's timeline and tokens. A mailbox of limited size makes the stream wait for a
    slow page."""
    mailbox: asyncio.Queue[str | None] = asyncio.Queue(maxsize=256)
    is_over = asyncio.Event()

    async def follow_tokens() -> None:
        async with aclosing(served.client.stream(request_id)) as events:
            async for event in events:
                text = await served.client.turns.run(_shown(event))
                await served.client.turns.run(free_logprobs(event))
                await mailbox.put(message("tokens", text))
        is_over.set()

    async def follow_timeline(shown: Timeline) -> None:
        await mailbox.put(await _request_message(served, shown))
        while True:
            was_over = is_over.is_set()
            current = await served.client.timeline(request_id)
            if current != shown:
                shown = current
                await mailbox.put(await _request_message(served, shown))
            if was_over:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(TIMELINE_SECONDS):
                    await is_over.wait()

    async def follow_both() -> None:
        tasks = [
            asyncio.create_task(coroutine)
            for coroutine in (follow_timeline(timeline), follow_tokens())
        ]
        try:
            await asyncio.gather(*tasks)
        except Exception as error:  # the page must get the error, or it would wait for ever
            if not isinstance(error, PromptqError):
                get_logger().exception("not shown", request_id=request_id)
            body = as_api_error(error).body
            await mailbox.put(message("problem", json.dumps(body["error"])))
        finally:
            await end(tasks)
        await mailbox.put(None)

    following = asyncio.create_task(follow_both())
    try:
        while (text := await mailbox.get()) is not None:
            yield text + _at_hand(mailbox)
    finally:
        await end([following])


def _shown(event: TokenEvent) -> Work[str]:
    """Returns the event as JSON, without the prompt's fields, which pages do not show."""
    logprobs = []
    for chosen in event.logprobs or ():
        logprobs.append(chosen.model_dump_json())
        yield
    names = ("logprobs", "prompt_logprobs", "prompt_texts", "prompt_token_ids")
    text = event.model_copy(update=dict.fromkeys(names)).to_json()
    if not logprobs:
        return text
    return text.replace('"logprobs":null', f'"logprobs":[{",".join(logprobs)}]', 1)


def _at_hand(mailbox: asyncio.Queue[str | None]) -> str:
    """Returns all waiting messages at once, so that a long text is not sent as thousands of
    packets."""
    texts: list[str] = []
    while not mailbox.empty():
        text = mailbox.get_nowait()
        if text is None:
            mailbox.put_nowait(None)
            break
        texts.append(text)
    return "".join(texts)


async def _request_message(served: ServedQueue, timeline: Timeline) -> str:
    payload = timeline.payload
    if len(payload) > MAX_SHOWN_PAYLOAD:
        payload = payload[:MAX_SHOWN_PAYLOAD] + "…"
    shown = timeline.model_copy(update={"payload": payload})
    return message("request", await _as_of_now(served, shown))
