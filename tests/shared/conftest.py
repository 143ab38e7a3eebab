"""A client and a queue on each kind of server in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from promptq.shared.queue.request_queue import RequestQueue
from tests.support.servers import Server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    client = server.connect()
    yield client
    client.close()


@pytest.fixture
def queue(client: Any) -> RequestQueue:
    return RequestQueue(client, worker_id="w1")
