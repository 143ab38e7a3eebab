"""Creates the client that a command uses, from its options."""

from __future__ import annotations

from promptq.producer.clients.sync_client import Client
from promptq.shared.settings.common import read_settings


def open_client(redis: str | None, queue: str | None, model: str | None = None) -> Client:
    """Returns the client for `--redis`, and `--queue` or `--model`. Raises PromptqError."""
    if model is not None:
        return Client(redis, queue, model=model)
    return Client(redis, queue or read_settings().queue)


def names_queue(queue: str | None) -> bool:
    """Returns whether `--queue` or PROMPTQ_QUEUE names a queue."""
    return queue is not None or "queue" in read_settings().model_fields_set


def open_client_of(redis: str | None, queue: str | None, request_id: str) -> Client:
    """Returns a client of the queue `--queue`, or else of the queue that has the request."""
    client = open_client(redis, queue)
    if names_queue(queue):
        return client
    with client:
        return Client(redis, client.queue_of_request(request_id))
