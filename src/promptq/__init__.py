"""A message-queue worker service for language-model inference: Redis is its API.

from promptq import Client

with Client() as client:
    for event in client.stream(client.enqueue("Once upon a time", max_tokens=64)):
        print(event.text, end="", flush=True)

Each name is imported when it is first used, so that a program loads no more than it needs. Errors
are in `promptq.shared.errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from promptq.producer.batches.local_batch import run_batch
    from promptq.producer.clients.async_client import AsyncClient
    from promptq.producer.clients.sync_client import Client
    from promptq.shared.queue.request_queue import AsyncRequestQueue, RequestQueue

    __version__: str

__all__ = ["AsyncClient", "AsyncRequestQueue", "Client", "RequestQueue", "__version__", "run_batch"]

_HOMES = {
    "AsyncClient": "promptq.producer.clients.async_client",
    "AsyncRequestQueue": "promptq.shared.queue.request_queue",
    "Client": "promptq.producer.clients.sync_client",
    "RequestQueue": "promptq.shared.queue.request_queue",
    "run_batch": "promptq.producer.batches.local_batch",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("promptq")
    if name not in _HOMES:
        raise AttributeError(f"module 'promptq' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
