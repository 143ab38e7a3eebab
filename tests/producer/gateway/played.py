"""Calls to a gateway whose worker a test plays by hand, by clients of each kind and by none."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from anthropic import Anthropic
from anthropic.types import Message
from openai import OpenAI
from openai.types.responses import Response

from promptq.shared.protocol.claims import Claim
from promptq.shared.protocol.output_style import OutputStyle
from tests.producer.gateway.living import LiveGateway
from tests.producer.playing import KEYS, HandWorker

STYLE = OutputStyle(
    "arguments",
    "<call>",
    "</call>",
    reasoning_before="<think>",
    reasoning_after="</think>",
)
TURNS: Any = [{"role": "user", "content": "Go"}]
FIELDS: Any = {"model": "", "max_tokens": 50, "messages": TURNS}
TOOL: Any = {
    "name": "paint", "description": "Paints.",
    "input_schema": {
        "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"], "additionalProperties": False,
    },
}  # fmt: skip


def anthropic_of(gateway: LiveGateway, key: str = "none") -> Anthropic:
    """Anthropic's client, which asks once, so that a test sees each answer."""
    return Anthropic(base_url=gateway.url, api_key=key, max_retries=0)


def openai_of(gateway: LiveGateway, key: str = "none") -> OpenAI:
    """OpenAI's client, which asks once too."""
    return OpenAI(base_url=gateway.base_url, api_key=key, max_retries=0)


def tell_style(worker: HandWorker) -> None:
    """Say how the queue's model writes, as its workers do."""
    worker.redis.hset(KEYS.model, mapping={"model": "by-hand", "tool_call_style": STYLE.to_json()})


def worked(
    worker: HandWorker, ask: Callable[[], Any], work: Callable[[Claim], Any]
) -> tuple[Any, dict[str, Any]]:
    """Returns the reply to a call that the worker answers in this way, and its payload."""
    with ThreadPoolExecutor() as beside:
        asking = beside.submit(ask)
        refused = threading.Event()
        asking.add_done_callback(lambda _: refused.set())
        claim = worker.queue.take(abort=refused)
        if claim is None:
            raise AssertionError("the call was refused") from asking.exception()
        worker.adopt(claim)
        work(claim)
        return asking.result(), json.loads(claim.payload)


def message_of(
    client: Anthropic, worker: HandWorker, says: str = "Hi", **fields: Any
) -> tuple[Message, dict[str, Any]]:
    """The message that the worker writes with this text, and the payload it got."""
    return worked(
        worker,
        lambda: client.messages.create(**{**FIELDS, **fields}),
        lambda claim: worker.finish(claim, says),
    )


def response_of(
    client: OpenAI, worker: HandWorker, says: str = "Hi", **fields: Any
) -> tuple[Response, dict[str, Any]]:
    """The response that the worker writes with this text, and the payload it got."""
    return worked(
        worker,
        lambda: client.responses.create(**{"model": "", **fields}),
        lambda claim: worker.finish(claim, says),
    )


def streamed(
    client: Anthropic, worker: HandWorker, texts: list[str], **fields: Any
) -> tuple[list[Any], Message]:
    """The raw events of a stream whose worker sends these texts, and what the client makes of it.

    Both are read from one stream by the client's own helper.
    """

    def ask() -> tuple[list[Any], Message]:
        with client.messages.stream(**{**FIELDS, **fields}) as stream:
            own = {"text", "thinking", "input_json", "citation", "signature"}
            events = [event for event in stream if event.type not in own]
            return events, stream.get_final_message()

    def work(claim: Claim) -> None:
        for text in texts[:-1]:
            worker.send(claim, text)
        worker.finish(claim, texts[-1])

    found, _ = worked(worker, ask, work)
    return found


@contextmanager
def begun(client: Anthropic, worker: HandWorker, **fields: Any) -> Iterator[tuple[Any, Claim]]:
    """A stream whose worker has sent some text, and the claim of its request."""
    with ThreadPoolExecutor() as beside:
        asking = beside.submit(lambda: client.messages.create(**{**FIELDS, **fields}, stream=True))
        claim = worker.take_next()
        worker.send(claim, "Half")
        stream = asking.result()
    with closing(stream):
        yield stream, claim


@contextmanager
def in_background(client: OpenAI, worker: HandWorker, **fields: Any) -> Iterator[tuple[str, Any]]:
    """The id of a response in the background, and the claim of its request."""
    made = client.responses.create(**{"model": "", "input": "Go", "background": True, **fields})
    assert made.status == "queued"
    yield made.id, worker.take()


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
        return "".join(text_in(self.next()[1]) for _ in range(num_events))

    def rest(self) -> list[tuple[str, Any]]:
        return list(self.frames)


def text_in(chunk: Any) -> str:
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for choice in chunk["choices"]
    )


def texts_of(frames: list[tuple[str, Any]]) -> str:
    return "".join(text_in(data) for _, data in frames if data != "[DONE]")


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
    http: httpx2.Client,
    worker: HandWorker,
    body: dict[str, Any],
    text: str = "a",
    *,
    path: str = "",
    **headers: str,
) -> Iterator[tuple[Reading, Claim]]:
    """A stream of a request that has emitted `text`, which is when its answer begins."""
    with ThreadPoolExecutor() as beside:
        path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
        asked = http.build_request("POST", path, json=body, headers=headers)
        asking = beside.submit(lambda: http.send(asked, stream=True))
        claim = worker.take_next()
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
