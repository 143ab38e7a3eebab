"""Responses of a gateway whose worker a test plays by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from openai import OpenAI
from openai.types.responses import Response

from promptq.shared.protocol.output_style import OutputStyle
from tests.producer.gateway.living import LiveGateway
from tests.producer.playing import KEYS, HandWorker

STYLE = OutputStyle("arguments", "<call>", "</call>")


def client_of(gateway: LiveGateway, key: str = "none") -> OpenAI:
    return OpenAI(base_url=gateway.base_url, api_key=key, max_retries=0)


def tell_style(worker: HandWorker) -> None:
    """Say how the queue's model writes calls, as its workers do."""
    worker.redis.hset(KEYS.model, mapping={"model": "by-hand", "tool_call_style": STYLE.to_json()})


def answered(
    client: OpenAI, worker: HandWorker, says: str = "Hi", **fields: Any
) -> tuple[Response, dict[str, Any]]:
    """The response to a call, which the worker answers with this text, and the payload it got."""
    with ThreadPoolExecutor() as beside:
        asking = beside.submit(lambda: client.responses.create(**{"model": "", **fields}))
        refused = threading.Event()
        asking.add_done_callback(lambda _: refused.set())
        claim = worker.queue.take(abort=refused)
        if claim is None:
            raise AssertionError("the call was refused") from asking.exception()
        worker.adopt(claim)
        worker.finish(claim, says)
        return asking.result(), worker.payload(claim.request_id)


@contextmanager
def in_background(client: OpenAI, worker: HandWorker, **fields: Any) -> Iterator[tuple[str, Any]]:
    """The id of a response in the background, and the claim of its request."""
    made = client.responses.create(**{"model": "", "input": "Go", "background": True, **fields})
    assert made.status == "queued"
    yield made.id, worker.take()
