"""Options and arguments that several commands share, and the client made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptq.producer.clients.sync_client import Client
from promptq.shared.settings.common import read_settings

Redis = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="Server to talk to; default: PROMPTQ_REDIS_URL, or the running `promptq up`.",
        show_default=False,
    ),
]
Queue = Annotated[
    str | None,
    typer.Option(
        "--queue",
        metavar="NAME",
        help="Queue; default: PROMPTQ_QUEUE, or `default`.",
        show_default=False,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Keep the embedded server's data here; default: nothing is kept.",
        show_default=False,
    ),
]
Target = Annotated[
    float,
    typer.Option("--target", min=0.001, help="How many seconds a request should wait at most."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
RequestId = Annotated[str, typer.Argument(metavar="ID", help="Id of the request.")]


def open_client(redis: str | None, queue: str | None, model: str | None = None) -> Client:
    """The client for a command's `--redis`, and `--queue` or `--model`. Raises PromptqError."""
    if model is not None:
        return Client(redis, queue, model=model)
    return Client(redis, queue or read_settings().queue)


def names_queue(queue: str | None) -> bool:
    """Whether `--queue` or PROMPTQ_QUEUE names the queue."""
    return queue is not None or "queue" in read_settings().model_fields_set


def open_client_of(redis: str | None, queue: str | None, request_id: str) -> Client:
    """The client of `--queue`, or else of the queue in which a request is known."""
    client = open_client(redis, queue)
    if names_queue(queue):
        return client
    with client:
        return Client(redis, client.queue_of_request(request_id))
