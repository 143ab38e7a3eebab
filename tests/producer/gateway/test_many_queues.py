"""One gateway for all queues of a server: a model's name finds its queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest
import redis

from promptq import Client
from promptq.shared.protocol.keys import ALIASES, Keys
from promptq.shared.protocol.keys import QUEUES as QUEUE_NAMES
from promptq.shared.server.acl import user_rules
from tests.producer.gateway.living import (
    LiveGateway,
    bearer,
    error_of,
    live_gateway,
    live_http,
    live_worker,
    make_key,
)
from tests.support.model_free import BY_ITSELF, served_model_free, text_of
from tests.support.roles import as_role

QUEUES = {"default": "owl", "b": "wren"}
"""Names of models by their queues."""
REFUSED = [
    *("embed", "pictures", "prompt_logprobs", "response_format", "scores", "tool_choice"),
]
"""Fields that the model-free engine cannot serve."""


@pytest.fixture
def workers(redis_url: str) -> Iterator[None]:
    with ExitStack() as stack:
        for queue, model in QUEUES.items():
            stack.enter_context(
                live_worker(redis_url, served_model_free(name=model), queue=queue, **BY_ITSELF)
            )
        yield


@pytest.fixture
def http(start_gateway: Callable[..., LiveGateway]) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=start_gateway().url, timeout=30) as client:
        yield client


def complete(http: httpx2.Client, model: str | None, **fields: Any) -> httpx2.Response:
    named = {} if model is None else {"model": model}
    body = {"prompt": "Hi", "seed": 3, "max_tokens": 6, **named, **fields}
    headers = fields.pop("headers", {})
    body.pop("headers", None)
    return http.post("/v1/completions", json=body, headers=headers)


def num_requests(server: redis.Redis, queue: str) -> int:
    return len(server.keys(Keys(queue).request("*")))


@pytest.mark.usefixtures("workers")
def test_a_model_finds_its_queue(http: httpx2.Client, everything: redis.Redis) -> None:
    for model, queue in (("owl", "default"), ("wren", "b"), (None, "default")):
        before = num_requests(everything, queue)
        answer = complete(http, model)
        assert answer.json()["choices"][0]["text"] == text_of(3, 6)
        assert answer.json()["model"] == QUEUES[queue]
        assert num_requests(everything, queue) == before + 1
    refused = complete(http, "heron")
    assert error_of(refused) == (404, "model_not_found")
    said = refused.json()["error"]["message"]
    assert said == "model: no queue serves 'heron'; there are 'owl', 'wren'"


def test_a_model_that_nobody_serves_is_refused_while_the_own_queue_has_none(
    http: httpx2.Client, redis_url: str
) -> None:
    early = {"wait_for_worker": False}
    assert error_of(complete(http, "owl", **early)) == (503, "no_worker")
    with live_worker(redis_url, served_model_free(name="wren"), queue="b"):
        while not http.get("/v1/models").json()["data"]:
            pass
        assert error_of(complete(http, "owl")) == (404, "model_not_found")
        assert complete(http, "wren").status_code == 200


@pytest.mark.usefixtures("workers")
def test_all_models_are_listed(http: httpx2.Client, everything: redis.Redis) -> None:
    everything.hset(ALIASES, mapping={"gpt-4o": "wren", "gone": "no such model"})
    listed = http.get("/v1/models").json()
    assert http.get("/v1/models/").json() == listed
    assert http.head("/v1/models").status_code == 200
    found = {it["id"]: it for it in listed["data"]}
    assert [*found] == ["owl", "wren", "gpt-4o"]
    assert found["wren"]["max_model_len"] == 4096
    assert found["wren"]["refused_fields"] == REFUSED
    assert found["gpt-4o"]["root"] == "wren"
    assert http.get("/v1/models/gpt-4o").json() == found["gpt-4o"]
    assert error_of(http.get("/v1/models/gone")) == (404, "model_not_found")


@pytest.mark.usefixtures("workers")
def test_a_further_name_of_a_model(http: httpx2.Client, everything: redis.Redis) -> None:
    everything.hset(ALIASES, "gpt-4o", "wren")
    assert complete(http, "gpt-4o").json()["model"] == "wren"
    large = complete(http, "gpt-4o", metadata={"of": "x" * 100_000}, prompt="Hi" * 50)
    assert large.status_code == 200, large.text
    assert num_requests(everything, "b") == 2


@pytest.mark.usefixtures("workers")
def test_a_stream_is_found_in_its_queue(http: httpx2.Client) -> None:
    body = {"model": "wren", "prompt": "Hi", "seed": 3, "max_tokens": 6, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        address = answer.headers["x-stream-url"]
        first = answer.read().decode()
    again = http.get(address).text
    assert _data_of(again) == _data_of(first)
    assert http.delete(address).json()["status"] == "finished"
    unknown = address.replace("cmpl-0", "cmpl-1")
    assert http.get(unknown).status_code == 404


def _data_of(stream: str) -> list[str]:
    return [line for line in stream.splitlines() if line.startswith("data:")]


def test_queues_of_one_model_share_its_load(redis_url: str, everything: redis.Redis) -> None:
    with ExitStack() as stack:
        for queue in ("b", "c"):
            stack.enter_context(
                live_worker(
                    redis_url, served_model_free(name="wren", step_seconds=0.05), queue=queue
                )
            )
        gateway = stack.enter_context(live_gateway(as_role("gateway", redis_url)))
        calls = [{"prompt": "Hi", "model": "wren", "max_tokens": 10} for _ in range(12)]
        statuses = asyncio.run(_post_at_once(gateway, calls))
        assert statuses == [200] * 12
        counts = [num_requests(everything, queue) for queue in ("b", "c")]
        assert sum(counts) == 12
        assert min(counts) >= 4


async def _post_at_once(gateway: LiveGateway, bodies: list[dict[str, Any]]) -> list[int]:
    async with httpx2.AsyncClient(base_url=gateway.base_url, timeout=30) as http:
        answers = [http.post("/completions", json=body) for body in bodies]
        return [it.status_code for it in await asyncio.gather(*answers)]


def test_a_call_that_is_sent_again_runs_once(redis_url: str, everything: redis.Redis) -> None:
    """Also if its model has come to a further queue meanwhile, which has less to do."""
    with ExitStack() as stack:
        gateway = stack.enter_context(live_gateway(as_role("gateway", redis_url)))
        http = stack.enter_context(httpx2.Client(base_url=gateway.url, timeout=30))
        stack.enter_context(live_worker(redis_url, served_model_free(name="wren"), queue="b"))
        keys = [f"key-{number}" for number in range(8)]
        first = [complete(http, "wren", headers={"Idempotency-Key": it}).json() for it in keys]
        stack.enter_context(live_worker(redis_url, served_model_free(name="wren"), queue="c"))
        while num_requests(everything, "c") == 0:  # until the gateway has found it
            complete(http, "wren")
        before = num_requests(everything, "b") + num_requests(everything, "c")
        again = [complete(http, "wren", headers={"Idempotency-Key": it}).json() for it in keys]
        assert [it["id"] for it in again] == [it["id"] for it in first]
        assert num_requests(everything, "b") + num_requests(everything, "c") == before
        new = [complete(http, "wren", headers={"Idempotency-Key": f"new-{it}"}) for it in range(16)]
        assert {it.status_code for it in new} == {200}


@pytest.mark.usefixtures("workers")
def test_a_key_may_be_for_some_models(
    http: httpx2.Client, redis_url: str, everything: redis.Redis
) -> None:
    everything.hset(ALIASES, "gpt-4o", "wren")
    secret = make_key(redis_url, "birds", models=("wren",))
    http.headers.update(bearer(secret))
    assert complete(http, "wren").status_code == 200
    assert complete(http, "gpt-4o").status_code == 200
    for other in ("owl", None):
        assert error_of(complete(http, other)) == (403, "model")
    assert [it["id"] for it in http.get("/v1/models").json()["data"]] == ["wren", "gpt-4o"]
    assert http.get("/v1/models/owl").status_code == 403


@pytest.mark.usefixtures("workers")
def test_a_key_for_some_models_learns_no_others(http: httpx2.Client, redis_url: str) -> None:
    http.headers.update(bearer(make_key(redis_url, "boss", models=("wren",), is_admin=True)))
    refused = complete(http, "no such model")
    assert error_of(refused) == (403, "model")
    assert "owl" not in refused.text
    play = "/dashboard/api/play"
    for queue, status in (("default", 403), ("b", 200)):
        body = {"prompt": "Hi", "max_tokens": 2}
        assert http.post(play, json=body, params={"queue": queue}).status_code == status
    wrong = http.post(play, json={"prompt": "Hi", "model": ["wren"]}, params={"queue": "b"})
    assert wrong.status_code == 400


@pytest.mark.usefixtures("workers")
def test_a_queue_that_somebody_spoilt_harms_no_other(
    http: httpx2.Client, redis_url: str, everything: redis.Redis
) -> None:
    for name in ("leases", "config", "pending", "tenants:waiting", "workers"):
        everything.set(f"promptq:{{spoilt}}:{name}", "x")
    everything.sadd(QUEUE_NAMES, "spoilt", "not a name!", *(f"many-{it}" for it in range(2000)))
    assert complete(http, "wren").status_code == 200
    assert complete(http, "owl").status_code == 200
    assert http.get("/readyz").status_code == 200
    assert len(http.get("/v1/models").json()["data"]) == 2
    assert len(http.get("/dashboard/api/caller").json()["queues"]) <= 300
    with Client(redis_url, model="wren") as client:
        assert client.queue.keys.queue == "b"


def test_a_keyed_call_goes_where_somebody_works(redis_url: str, everything: redis.Redis) -> None:
    with ExitStack() as stack:
        with live_worker(redis_url, served_model_free(name="wren"), queue="c"):
            pass  # the queue keeps its model
        stack.enter_context(live_worker(redis_url, served_model_free(name="wren"), queue="b"))
        gateway = stack.enter_context(live_gateway(as_role("gateway", redis_url)))
        http = stack.enter_context(httpx2.Client(base_url=gateway.url, timeout=30))
        for number in range(12):
            headers = {"Idempotency-Key": f"key-{number}"}
            assert complete(http, "wren", headers=headers).status_code == 200
        assert num_requests(everything, "c") == 0


def test_a_model_whose_queue_was_named_may_still_load(
    redis_url: str, start_gateway: Callable[..., LiveGateway]
) -> None:
    url = start_gateway(queues=["default", "b"]).url
    with (
        httpx2.Client(base_url=url, timeout=30) as http,
        live_worker(redis_url, served_model_free(name="owl")),
    ):
        while not http.get("/v1/models").json()["data"]:
            pass
        loading = complete(http, "wren")
        assert error_of(loading) == (503, "no_worker")
        assert loading.headers["retry-after"] == "5"
        with live_worker(redis_url, served_model_free(name="wren"), queue="b"):
            while complete(http, "wren").status_code == 503:
                pass
            assert error_of(complete(http, "heron")) == (404, "model_not_found")


@pytest.mark.usefixtures("workers")
def test_a_gateway_may_serve_the_queues_that_are_named(
    start_gateway: Callable[..., LiveGateway],
) -> None:
    with httpx2.Client(base_url=start_gateway(queues=["b"]).url, timeout=30) as http:
        assert [it["id"] for it in http.get("/v1/models").json()["data"]] == ["wren"]
        assert complete(http, None).json()["model"] == "wren"
        assert error_of(complete(http, "owl")) == (404, "model_not_found")


@pytest.mark.usefixtures("workers")
def test_a_gateway_whose_user_may_read_one_queue(
    everything: redis.Redis, redis_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    everything.execute_command("ACL", "SETUSER", "one", *user_rules("gateway", "default", "pw"))
    address = as_role("", redis_url).partition("://")[2]
    with live_http(f"redis://one:pw@{address}") as http:
        assert complete(http, "owl").status_code == 200
        assert error_of(complete(http, "wren")) == (404, "model_not_found")
        assert http.get("/readyz").status_code == 200
    assert "a queue cannot be read, and is not served" in "".join(capfd.readouterr())


@pytest.mark.usefixtures("workers")
def test_metrics_and_the_dashboard_know_all_queues(http: httpx2.Client) -> None:
    complete(http, "wren")
    text = http.get("/metrics").text
    for queue, model in QUEUES.items():
        assert f'promptq_queue_up{{queue="{queue}"}} 1.0' in text
        assert f'model_name="{model}"' in text
    told = http.get("/dashboard/api/caller").json()["queues"]
    assert told == [{"name": name, "model": model} for name, model in QUEUES.items()]
    found = http.get("/dashboard/api/requests", params={"queue": "b"}).json()["requests"]
    assert len(found) == 1
    assert http.get("/dashboard/api/requests").json()["requests"] == []
    assert http.get("/dashboard/api/requests", params={"queue": "z"}).status_code == 404


@pytest.mark.usefixtures("workers")
def test_tokens_are_counted_where_they_are_made(
    http: httpx2.Client, redis_url: str, everything: redis.Redis
) -> None:
    secret = make_key(redis_url, "few", requests_per_minute=3, tokens_per_minute=1000)
    http.headers.update(bearer(secret))
    left = []
    for model in ("owl", "wren", "owl"):
        answer = complete(http, model)
        left.append(answer.headers["x-ratelimit-remaining-requests"])
        assert "x-ratelimit-remaining-tokens" in answer.headers
    assert left == ["2", "1", "0"]
    assert complete(http, "wren").status_code == 429
    http.headers.update(
        bearer(make_key(redis_url, "dearer", requests_per_minute=60, tokens_per_minute=60))
    )
    assert complete(http, "wren", max_tokens=40).status_code == 200
    before = float(everything.hget(f"{Keys('default').prefix}rate:dearer", "requests") or 0)
    refused = complete(http, "wren", prompt="Hi " * 60)
    assert error_of(refused) == (429, "rate_limit_exceeded")
    after = float(everything.hget(f"{Keys('default').prefix}rate:dearer", "requests") or 0)
    assert after - before < 1500, "one request, which takes a second of the rate, and no second one"
    for queue, rates in (("default", {b"requests", b"tokens"}), ("b", {b"tokens"})):
        assert {*everything.hkeys(f"{Keys(queue).prefix}rate:few")} == rates
