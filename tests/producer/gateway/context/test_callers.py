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
