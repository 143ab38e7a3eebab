"""Serves the data on the dashboard's pages. Actions are in actions.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from promptq.producer.admin.timeline import Timeline
from promptq.producer.calls.call_body import check_one_of
from promptq.producer.calls.errors import as_api_error
from promptq.producer.calls.logprobs import free_logprobs
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.clients.connecting import explained
from promptq.producer.gateway.dashboard import request_search
from promptq.producer.gateway.dashboard.page_stream import event_response, message
from promptq.producer.gateway.dashboard.poller import Poller, Topic
from promptq.producer.gateway.dashboard.request_search import FoundRequests
from promptq.producer.http.auth import ThisAdmin, admin_of
from promptq.producer.http.state import Gateway, ThisGateway
from promptq.shared.errors import PromptqError, RequestNotFoundError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.keys import check_request_id
from promptq.shared.protocol.worker_stats import SAMPLE_MS
from promptq.shared.queue import lookups
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.tasks import end
from promptq.shared.runtime.turns import Work

router = APIRouter(
    prefix="/dashboard/api", include_in_schema=False, dependencies=[Depends(admin_of)]
)

TIMELINE_SECONDS = 1.0
"""Seconds between two checks whether a request's timeline has changed."""

MAX_SHOWN_PAYLOAD = 65_536
"""The most characters of a payload that a page shows, because nobody reads more."""

MAX_SHOWN_DEAD = 100
"""The most dead letters on a page. One more id is read, to know whether there are more."""

RequestId = Annotated[str, Query(alias="id")]


async def shown_queue(gateway: ThisGateway, queue: str = "") -> ServedQueue:
    """Returns the queue that the query names, or the gateway's own. Raises ApiError 404."""
    return await gateway.queues.named(queue)


ThisQueue = Annotated[ServedQueue, Depends(shown_queue)]
"""Type of a route's parameter that gets the page's queue."""


class _Dead(BaseModel):
    ids: list[str]


class _OpenPage:
    """A connection on which a page gets messages about the queue that it shows."""

    def __init__(self, request: Request, gateway: Gateway, served: ServedQueue) -> None:
        self.served = served
        self._request, self._gateway = request, gateway

    @property
    def poller(self) -> Poller:
        """The poller of the gateway. It polls while at least one page is open."""
        state = self._request.app.state
        if not hasattr(state, "poller"):
            state.poller = Poller(partial(_read, self._gateway))
        poller: Poller = state.poller
        return poller

    def send(self, messages: AsyncGenerator[str, None]) -> StreamingResponse:
        return event_response(self._request, self._gateway, messages)

    def send_polled(self, *kind_and_id: str) -> StreamingResponse:
        """Returns a response that sends data of the page's queue once a second. The arguments are
        the words that follow the queue's name in a `Topic`."""
        return self.send(_polled(self.poller, (self.served.name, *kind_and_id)))


def open_page(request: Request, gateway: ThisGateway, served: ThisQueue) -> _OpenPage:
    """Creates the connection of a page. FastAPI below 0.124 cannot call the class itself."""
    return _OpenPage(request, gateway, served)


OpenPage = Annotated[_OpenPage, Depends(open_page)]


@router.get("/caller")
async def caller(admin: ThisAdmin, gateway: ThisGateway) -> dict[str, object]:
    """Returns the caller's name and the queues, the gateway's own first."""
    views = await gateway.queues.views()
    queues = [{"name": served.name, "model": view.model} for served, view in views]
    return {"name": admin.name, "queues": queues}


@router.get("/live/overview")
async def live_overview(page: OpenPage) -> StreamingResponse:
    """Stream the samples of the last hour, then the overview once a second."""
    return page.send(_overview(page.served, page.poller))


@router.get("/live/worker")
async def live_worker(page: OpenPage, worker_id: RequestId) -> StreamingResponse:
    """Stream a worker and its batch, once a second."""
    return page.send_polled("worker", worker_id)


@router.get("/live/request")
async def live_request(page: OpenPage, request_id: RequestId) -> StreamingResponse:
    """Stream a request's events from the first one on, and its timeline when it changes."""
    timeline = await page.served.client.timeline(check_request_id(request_id))
    return page.send(_request(page.served, request_id, timeline))


@router.get("/live/requests")
async def live_requests(page: OpenPage, state: str, tenant: str = "") -> StreamingResponse:
    """Stream the first page of requests in a state, once a second. The state is one of `SETS`."""
    check_one_of("state", state, request_search.SETS)
    page.served.queue.keys.pending_of(tenant)  # raises an error for a wrong name
    return page.send_polled("requests", state, tenant)


@router.get("/live/dead")
async def live_dead(page: OpenPage) -> StreamingResponse:
    """Stream the ids of the latest dead letters, once a second. Ids are enough, because the content
    of a dead letter never changes."""
    return page.send_polled("dead")


@router.get("/requests")
async def requests(
    served: ThisQueue, state: str = "", tenant: str = "", prefix: str = "", cursor: str = ""
) -> FoundRequests:
    """Returns a page of requests by `state`, `tenant` and `prefix` (the beginning of the id)."""
    return await request_search.search(
        served.queue, state=state, tenant=tenant, prefix=prefix, cursor=cursor
    )


@router.get("/dead")
async def dead_letters(
    served: ThisQueue, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[dict[str, object]]:
    """List dead letters, the latest first. Long payloads are cut."""
    letters = await served.client.dead_letters(limit)
    return [{**letter.model_dump(), "payload": letter.payload[:4096]} for letter in letters]


async def _read(gateway: Gateway, topic: Topic) -> str:
    name, *kind_and_id = topic
    served = await gateway.queues.named(name)
    return await _as_of_now(served, await _value_of(served, kind_and_id))


async def _value_of(served: ServedQueue, kind_and_id: list[str]) -> BaseModel | None:
    match kind_and_id:
        case ["overview"]:
            return await served.client.overview()
        case ["dead"]:
            return _Dead(ids=await served.client.dead_ids(MAX_SHOWN_DEAD + 1))
        case ["requests", state, tenant]:
            with explained(served.client.url):
                return await request_search.search(served.queue, state=state, tenant=tenant)
    try:
        return await served.client.worker(kind_and_id[1])
    except RequestNotFoundError:
        return None


async def _as_of_now(served: ServedQueue, value: BaseModel | None) -> str:
    """Returns a value as JSON, with the server's time, from which pages compute ages."""
    with explained(served.client.url):
        now_ms = await served.queue.run(lookups.server_time_ms())
    text = "null" if value is None else value.model_dump_json()
    return f'{{"now":{now_ms},"value":{text}}}'


async def _polled(poller: Poller, topic: Topic) -> AsyncGenerator[str, None]:
    """Yields a topic's states as server-sent events whose type is the topic's kind."""
    async with aclosing(poller.watch(topic)) as samples:
        async for sample in samples:
            yield message("unreachable", "null") if sample is None else message(topic[1], sample)


async def _overview(served: ServedQueue, poller: Poller) -> AsyncGenerator[str, None]:
    with suppress(PromptqError):  # the next message reports that the queue cannot be reached
        samples = await served.client.statistics()
        dumped = [sample.model_dump(mode="json") for sample in samples]
        yield message("history", json.dumps({"sample_ms": SAMPLE_MS, "samples": dumped}))
    async with aclosing(_polled(poller, (served.name, "overview"))) as messages:
        async for text in messages:
            yield text


async def _request(
    served: ServedQueue, request_id: str, timeline: Timeline
) -> AsyncGenerator[str, None]:
    """Yields a request's timeline and tokens as messages. The messages wait in a mailbox of limited
    size, so a slow page slows the reading of the stream."""
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
            yield text + _waiting_messages(mailbox)
    finally:
        await end([following])


def _shown(event: TokenEvent) -> Work[str]:
    """Returns an event as JSON without the prompt's fields, which pages do not show."""
    logprobs = []
    for chosen in event.logprobs or ():
        logprobs.append(chosen.model_dump_json())
        yield
    names = ("logprobs", "prompt_logprobs", "prompt_texts", "prompt_token_ids")
    text = event.model_copy(update=dict.fromkeys(names)).to_json()
    if not logprobs:
        return text
    return text.replace('"logprobs":null', f'"logprobs":[{",".join(logprobs)}]', 1)


def _waiting_messages(mailbox: asyncio.Queue[str | None]) -> str:
    """Takes all messages out of the mailbox, so that a long text is not sent as thousands of
    packets. Leaves the None that marks the end."""
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
