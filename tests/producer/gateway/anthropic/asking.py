"""Messages of a gateway whose worker a test plays by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

from anthropic import Anthropic
from anthropic.types import Message

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


def client_of(gateway: LiveGateway, key: str = "none") -> Anthropic:
    """Anthropic's client, which asks once, so that a test sees each answer."""
    return Anthropic(base_url=gateway.url, api_key=key, max_retries=0)


def tell_style(worker: HandWorker) -> None:
    """Say how the queue's model writes, as its workers do."""
    worker.redis.hset(KEYS.model, mapping={"model": "by-hand", "tool_call_style": STYLE.to_json()})


def worked(
    worker: HandWorker, ask: Callable[[], Any], work: Callable[[Claim], Any]
) -> tuple[Any, dict[str, Any]]:
    """What a call gives that the worker answers in this way, and the payload it got."""
    with ThreadPoolExecutor() as beside:
        asking = beside.submit(ask)
        refused = threading.Event()
        asking.add_done_callback(lambda _: refused.set())
        claim = worker.queue.take(abort=refused)
        if claim is None:
            raise AssertionError("the call was refused") from asking.exception()
        worker.adopt(claim)
        work(claim)
        return asking.result(), worker.payload(claim.request_id)


def answered(
    client: Anthropic, worker: HandWorker, says: str = "Hi", **fields: Any
) -> tuple[Message, dict[str, Any]]:
    """The message that the worker writes with this text, and the payload it got."""
    return worked(
        worker,
        lambda: client.messages.create(**{**FIELDS, **fields}),
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
        claim = worker.queue.take()
        assert claim is not None
        worker.adopt(claim)
        worker.send(claim, "Half")
        stream = asking.result()
    with closing(stream):
        yield stream, claim
