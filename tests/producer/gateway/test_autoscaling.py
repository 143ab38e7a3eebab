"""How many workers each queue should have, as whoever scales asks a gateway."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import pytest

from promptq import Client
from promptq.producer.admin.api_keys import ApiKey
from tests.producer.gateway.living import LiveGateway


def desired(http: httpx2.Client, **query: object) -> dict[str, int]:
    answer = http.get("/scaling", params=query)
    assert answer.status_code == 200, answer.text
    return {it["queue"]: it["desired"] for it in answer.json()["queues"]}


@pytest.fixture
def everything(start_gateway: Callable[..., LiveGateway]) -> LiveGateway:
    return start_gateway()


def test_a_queue_without_any_worker_yet_is_found_by_name(
    everything: LiveGateway, redis_url: str
) -> None:
    """So that a program which starts workers can start the first one."""
    with (
        httpx2.Client(base_url=everything.url, timeout=None) as http,
        Client(redis_url, "new") as client,
    ):
        assert desired(http, queue="new") == {"new": 0}
        client.enqueue("Once")
        assert desired(http, queue="new") == {"new": 1}
        assert desired(http) == {"default": 0}


def test_a_gateway_of_one_queue_shows_no_other(
    start_gateway: Callable[..., LiveGateway],
) -> None:
    gateway = start_gateway(queues=["default"])
    with httpx2.Client(base_url=gateway.url, timeout=None) as http:
        assert desired(http, queue="default") == {"default": 0}
        answer = http.get("/scaling", params={"queue": "new"})
        assert answer.status_code == 404
        assert "'new' is not served here" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    "query", [{"queue": "a b"}, {"target_seconds": "0"}, {"target_seconds": "nan"}]
)
def test_what_nobody_can_mean_is_refused(everything: LiveGateway, query: dict[str, str]) -> None:
    answer = httpx2.get(f"{everything.url}/scaling", params=query, timeout=None)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(query))


def test_it_needs_no_key_as_probes_have_none(everything: LiveGateway, redis_url: str) -> None:
    with Client(redis_url) as client:
        client.create_api_key(ApiKey(name="somebody"))
    assert httpx2.get(f"{everything.url}/scaling", timeout=None).status_code == 200


def test_metrics_have_the_same_figures(everything: LiveGateway, redis_url: str) -> None:
    with Client(redis_url) as client:
        client.enqueue("Once", deadline_ms=3_600_000)
    text = httpx2.get(f"{everything.url}/metrics", timeout=None).text
    assert 'promptq_queue_workers_desired{queue="default"} 1.0' in text
    assert 'promptq_queue_deadlines_at_risk{queue="default"} 0.0' in text
    assert "promptq_queue_work_seconds{" not in text, "nothing was measured yet"
