"""A caller's tenant and highest priority hold for its requests, whatever says who calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from promptq import Client
from promptq.producer.calls.caller import Caller
from tests.producer.gateway.living import LiveGateway, make_key
from tests.producer.gateway.played import PROMPT, is_cancelled, opened
from tests.producer.playing import HandWorker


@pytest.fixture
def http_of(start_gateway: Callable[..., LiveGateway]) -> Iterator[Callable[..., httpx2.Client]]:
    """HTTP clients, each of a caller of its own."""
    clients = []

    def make(**fields: Any) -> httpx2.Client:
        gateway = start_gateway(caller=Caller(name="key", is_admin=False, **fields))
        clients.append(httpx2.Client(base_url=gateway.url, timeout=30))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def test_a_caller_enqueues_as_its_tenant(
    http_of: Callable[..., httpx2.Client], own_worker: HandWorker
) -> None:
    """Whether it says so or not; it cannot name another one."""
    http = http_of(tenant="us")
    for fields in ({}, {"tenant": "us"}):
        with opened(http, own_worker, {**PROMPT, **fields}) as (_, claim):
            assert json.loads(claim.payload)["tenant"] == "us"
    answer = http.post("/v1/completions", json={"prompt": "Hi", "tenant": "them"})
    assert answer.status_code == 403
    assert answer.json()["error"]["param"] == "tenant"


def test_a_caller_without_a_tenant_cannot_take_one(
    http_of: Callable[..., httpx2.Client],
) -> None:
    answer = http_of().post("/v1/completions", json={"prompt": "Hi", "tenant": "them"})
    assert answer.status_code == 403


def test_a_caller_has_a_highest_priority(
    http_of: Callable[..., httpx2.Client], own_worker: HandWorker
) -> None:
    """A call without a priority gets that one; a more urgent one is refused."""
    http = http_of(highest_priority=5)
    for fields, priority in (({}, 5), ({"priority": 7}, 7)):
        with opened(http, own_worker, {**PROMPT, **fields}) as (_, claim):
            assert json.loads(claim.payload)["priority"] == priority
    for headers in ({"X-Priority": "4"}, {"X-Priority": "-1000"}):
        answer = http.post("/v1/completions", json=PROMPT, headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["param"] == "priority"


@pytest.mark.parametrize(
    ("highest", "tier", "priority", "served"),
    [
        (-1000, "priority", -10, "priority"),
        (-1000, "flex", 10, "flex"),
        (-1000, "auto", 0, "default"),
        (0, "priority", 0, "default"),
        (15, "priority", 15, "flex"),
    ],
)
def test_a_tier_serves_within_the_rights_of_the_caller(
    http_of: Callable[..., httpx2.Client],
    own_worker: HandWorker,
    highest: int,
    tier: str,
    priority: int,
    served: str,
) -> None:
    """Each API's answer names the tier that served, in whole answers and in streams."""
    http = http_of(highest_priority=highest)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    response, message = {"input": "Hi", "store": False}, {**chat, "model": "m"}
    names = {"default": "standard", "flex": "batch"}
    for path, body, where, name in (
        ("chat/completions", chat, ("service_tier",), served),
        ("completions", {"prompt": "Hi"}, ("service_tier",), served),
        ("responses", response, ("service_tier",), served),
        ("messages", message, ("usage", "service_tier"), names.get(served, served)),
    ):
        with own_worker.finishing(["x"]):
            answer = http.post(f"/v1/{path}", json={**body, "service_tier": tier}).json()
        for member in where:
            answer = answer[member]
        assert answer == name, path
    with opened(http, own_worker, {**PROMPT, "service_tier": tier}) as (reading, claim):
        assert json.loads(claim.payload).get("priority", 0) == priority
        _, chunk = reading.next()
        assert chunk.get("service_tier", "default") == served


def test_streams_are_their_tenants_own(
    http_of: Callable[..., httpx2.Client], own_worker: HandWorker
) -> None:
    """For others they are not there: they can neither read nor cancel."""
    ours, theirs = http_of(tenant="us"), http_of(tenant="them")
    with opened(ours, own_worker, {**PROMPT, "detach": True}) as (reading, claim):
        url = reading.response.headers["X-Stream-Url"]
        event_id, _ = reading.next()
        headers = {"Last-Event-ID": event_id}
        for answer in (
            theirs.get(url),
            theirs.delete(url),
            theirs.post("/v1/completions", json=PROMPT, headers=headers),
        ):
            assert answer.status_code == 404
        assert not is_cancelled(own_worker, claim.request_id)
        assert ours.delete(url).status_code == 200


def test_the_same_idempotency_key_of_another_tenant(
    http_of: Callable[..., httpx2.Client],
    start_gateway: Callable[..., LiveGateway],
    own_worker: HandWorker,
) -> None:
    """Is another key: nobody gets somebody else's answer."""
    ours = http_of(tenant="us")
    them = start_gateway(caller=Caller(name="other", tenant="them", is_admin=False))
    headers = {"Idempotency-Key": "same"}
    with (
        httpx2.Client(base_url=them.url, timeout=30) as theirs,
        opened(ours, own_worker, PROMPT, **headers) as (_, first),
        opened(theirs, own_worker, PROMPT, **headers) as (_, second),
    ):
        assert first.request_id != second.request_id


def id_of_call(gateway: LiveGateway, tenant: str | None = None, secret: str = "") -> str:
    headers = {"Idempotency-Key": "same"}
    if secret:
        headers["Authorization"] = f"Bearer {secret}"
    body = {**PROMPT, "detach": True, "tenant": tenant}
    url = f"{gateway.url}/v1/completions"
    with httpx2.stream("POST", url, json=body, headers=headers, timeout=None) as response:
        assert response.status_code == 200
        return str(response.headers["X-Request-Id"])


def test_the_same_idempotency_key_after_the_api_key_went_to_another_tenant(
    start_gateway: Callable[..., LiveGateway], redis_url: str
) -> None:
    """The key is created again under its old name, and the new tenant gets another answer."""
    gateway = start_gateway(http_header_seconds=0)
    ids = []
    for tenant in ("us", "them", "us"):
        secret = make_key(redis_url, "app", tenant=tenant)
        ids.append(id_of_call(gateway, secret=secret))
        with Client(redis_url) as client:
            client.revoke_api_key("app")
    assert ids[0] != ids[1]
    assert ids[0] == ids[2]


def test_an_administrator_may_send_one_idempotency_key_for_several_tenants(
    start_gateway: Callable[..., LiveGateway],
) -> None:
    """Each gets an answer of its own, and the same one when it is sent again."""
    gateway = start_gateway(http_header_seconds=0)
    ids = [id_of_call(gateway, tenant) for tenant in (None, "us", "them", "us", None)]
    assert len(set(ids)) == 3
    assert (ids[3], ids[4]) == (ids[1], ids[0])
