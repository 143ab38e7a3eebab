"""Calls of one conversation have one session, by which workers may find its beginning cached."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from promptq.producer.clients.affinity import affinity_of
from promptq.shared.protocol.request import Request
from tests.producer.gateway.living import LiveGateway
from tests.producer.gateway.played import openai_of, response_of
from tests.producer.playing import KEYS, HandWorker

MESSAGES = [{"role": "user", "content": "Once"}]
LONG = [{"role": "user", "content": "x" * 70_000}]


def affinity_in(own_worker: HandWorker, request_id: str) -> str | None:
    value: bytes | None = own_worker.redis.hget(KEYS.request(request_id), "affinity")
    return value.decode() if value is not None else None


def affinity_by(
    gateway: LiveGateway, own_worker: HandWorker, headers: dict[str, str], **fields: Any
) -> str | None:
    """Returns the hashes of the request that a chat becomes. No payload has its session."""
    body = {"messages": MESSAGES, **fields}
    with ThreadPoolExecutor() as beside:
        url = f"{gateway.base_url}/chat/completions"
        asking = beside.submit(httpx2.post, url, json=body, headers=headers, timeout=30)
        claim = own_worker.take_next()
        assert "session" not in own_worker.payload(claim.request_id)
        own_worker.finish(claim, "x")
        assert asking.result().status_code == 200
    return affinity_in(own_worker, claim.request_id)


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({}, {"session": "mine"}, "mine"),
        ({"X-Session-Id": "mine"}, {"prompt_cache_key": "not mine"}, "mine"),
        ({}, {"prompt_cache_key": "mine" * 100}, "mine" * 32),
        ({"X-Session-Id": "mine" * 100}, {}, "mine" * 32),
        ({"X-Session-Id": "mine"}, {"messages": LONG}, "mine"),  # read in another process
        ({"X-Session-Id": ""}, {"prompt_cache_key": ""}, None),
        ({}, {}, None),
    ],
)
def test_a_call_names_its_session(
    gateway: LiveGateway,
    own_worker: HandWorker,
    headers: dict[str, str],
    fields: dict[str, Any],
    session: str | None,
) -> None:
    request = Request(messages=fields.get("messages", MESSAGES), session=session)
    found = affinity_by(gateway, own_worker, headers, **fields)
    assert (found or "") == affinity_of(request)
    assert len((found or "").split()) == (
        0 if session is None else 5 if "messages" in fields else 1
    )


def test_a_chain_of_responses_is_a_session(gateway: LiveGateway, own_worker: HandWorker) -> None:
    with openai_of(gateway) as client:
        first, _ = response_of(client, own_worker, input="1?")
        second, _ = response_of(client, own_worker, input="2?", previous_response_id=first.id)
        third, _ = response_of(client, own_worker, input="3?", previous_response_id=second.id)
        other, _ = response_of(client, own_worker, input="1?")
    chain = {affinity_in(own_worker, response.id) for response in (first, second, third)}
    assert len(chain) == 1
    assert {None, affinity_in(own_worker, other.id)}.isdisjoint(chain)
