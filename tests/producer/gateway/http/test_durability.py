"""Calls with `durability: replicated`, on a server that has no replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx2
import pytest

from tests.producer.gateway.living import LiveGateway
from tests.producer.playing import KEYS, HandWorker

PROMPT = {"prompt": "Hi", "detach": True}


@pytest.fixture
def http(
    start_gateway: Callable[..., LiveGateway], redis_url: str, own_worker: HandWorker
) -> Iterator[httpx2.Client]:
    gateway = start_gateway(redis_url=f"{redis_url}?socket_timeout=1")
    with httpx2.Client(base_url=gateway.url, timeout=None) as client:
        yield client


@pytest.mark.parametrize("metadata", ["small", "large" * 20_000])
def test_a_call_that_replicas_lack_gets_its_id(
    http: httpx2.Client, own_worker: HandWorker, metadata: str
) -> None:
    """Another process reads a large body. The call runs, so no client may repeat it by itself."""
    body = {**PROMPT, "metadata": {"a": metadata}, "durability": "replicated"}
    answer = http.post("/v1/completions", json=body)
    [request_id] = own_worker.redis.zrange(KEYS.pending, 0, -1)
    assert answer.status_code == 503
    assert answer.headers["X-Should-Retry"] == "false"
    error = answer.json()["error"]
    assert error["code"] == "not_replicated"
    assert error["message"].startswith(f"the request {request_id.decode()!r} is written, but the")
    assert "durability" not in own_worker.payload(request_id.decode())


def test_a_wrong_durability_is_refused(http: httpx2.Client, own_worker: HandWorker) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for wrong in ("always", True, ["replicated"]):
        body = {"messages": messages, "durability": wrong}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "durability"
    assert own_worker.redis.zcard(KEYS.pending) == 0
