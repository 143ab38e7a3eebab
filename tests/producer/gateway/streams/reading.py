"""Streams of a gateway as a plain client opens and reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from promptq.shared.protocol.claims import Claim
from tests.producer.playing import KEYS, HandWorker

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
