"""Spoilt records of the queue and spoilt JSON disturb nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

from promptq import Client
from promptq.producer.admin.api_keys import ApiKey
from promptq.shared.errors import ConfigurationError
from tests.producer.gateway.living import LiveGateway, bearer, live_gateway, make_key
from tests.producer.playing import KEYS, Run
from tests.support.model_free import running_worker
from tests.support.roles import as_role


@pytest.fixture
def gateway(redis_url: str, tmp_path: Path) -> Iterator[LiveGateway]:
    with live_gateway(redis_url, files_dir=tmp_path) as gateway:
        yield gateway


@pytest.fixture
def admin(redis_url: str, gateway: LiveGateway) -> Iterator[httpx2.Client]:
    headers = bearer(make_key(redis_url, "admin", is_admin=True))
    with httpx2.Client(base_url=gateway.url, headers=headers, timeout=30) as http:
        yield http


async def test_a_worker_that_no_worker_is_hides_no_other_one(
    redis_url: str, admin: httpx2.Client, run: Run
) -> None:
    with redis.Redis.from_url(as_role("worker", redis_url)) as forger:
        forger.hset(KEYS.worker("ev"), mapping={"worker_id": "ev", "step_ms": "x"})
        forger.zadd(KEYS.workers, {"ev": 2**52})
    async with running_worker(redis_url) as worker:
        assert admin.get("/readyz").status_code == 200
        assert "promptq_queue_workers{" in admin.get("/metrics").text
        told = run("stats")
        assert told.returncode == 0
        assert worker.worker_id in told.stdout


@pytest.mark.parametrize(
    ("role", "key"),
    [("producer", KEYS.dead), ("worker", KEYS.model), ("worker", KEYS.workers)],
    ids=["dead", "model", "workers"],
)
async def test_a_key_of_another_type_takes_no_gateway_down(
    redis_url: str, admin: httpx2.Client, role: str, key: str
) -> None:
    """Without the key of workers it knows of none, so it takes no request that will not wait."""
    async with running_worker(redis_url):
        with redis.Redis.from_url(as_role(role, redis_url)) as forger:
            forger.delete(key)
            forger.set(key, "junk")
        fields = {"prompt": "a", "max_tokens": 2}
        answer = await asyncio.to_thread(admin.post, "/v1/completions", json=fields)
        assert answer.status_code == 200, answer.text
        ready = await asyncio.to_thread(admin.get, "/readyz")
        knows_workers = key != KEYS.workers
        assert ready.status_code == (200 if knows_workers else 503), ready.text
        assert knows_workers or ready.json()["error"]["code"] == "no_worker"
        metrics = await asyncio.to_thread(admin.get, "/metrics")
        assert 'promptq_queue_up{queue="default"} 1.0' in metrics.text


async def test_workers_that_strangers_made_up_take_no_gateway_down(
    redis_url: str, admin: httpx2.Client
) -> None:
    """An id that is no text, one whose record is of another type, and a model that is no text."""
    async with running_worker(redis_url):
        with redis.Redis.from_url(as_role("worker", redis_url)) as forger:
            forger.zadd(KEYS.workers, {b"\xff": "+inf", "x": "+inf"})
            forger.set(KEYS.worker("x"), "junk")
            forger.hset(KEYS.model, "model", b"\xff")
        answer = await asyncio.to_thread(
            admin.post, "/v1/completions", json={"prompt": "a", "max_tokens": 2}
        )
        assert answer.status_code == 200, answer.text
        ready = await asyncio.to_thread(admin.get, "/readyz")
        assert ready.status_code == 200, ready.text
        metrics = await asyncio.to_thread(admin.get, "/metrics")
        assert 'promptq_queue_up{queue="default"} 1.0' in metrics.text


HALF_A_CHARACTER: list[tuple[str, Any]] = [
    ("drain", b'{"id":"\\ud800"}'),
    ("cancel", b'{"id":"\\ud800"}'),
    ("dead/requeue", b'{"ids":["\\ud800"]}'),
    ("dead/purge", b'{"ids":["\\ud800"]}'),
    ("play", b'{"\\ud800":1}'),
    ("play", b'{"prompt":"\\ud800"}'),
]


@pytest.mark.parametrize(("action", "body"), HALF_A_CHARACTER)
def test_half_a_character_is_no_json_for_an_action(
    admin: httpx2.Client, action: str, body: bytes
) -> None:
    kind = {"Content-Type": "application/json"}
    answer = admin.post(f"/dashboard/api/{action}", content=body, headers=kind)
    assert answer.status_code == 400, answer.text


def test_no_key_is_called_as_callers_without_one(redis_url: str) -> None:
    with Client(redis_url) as client, pytest.raises(ConfigurationError, match=r"^name: 'local'"):
        client.create_api_key(ApiKey(name="local"))


@pytest.mark.parametrize("number", ["9" * 5000, "\uff13", "x"])
def test_a_number_of_a_record_that_is_none(
    redis_url: str, admin: httpx2.Client, number: str
) -> None:
    with redis.Redis.from_url(as_role("producer", redis_url)) as forger:
        fields = {"payload": '{"prompt":"a"}', "attempt": number, "enqueued_at": number}
        forger.hset(KEYS.request("r"), mapping=fields)
        forger.zadd(KEYS.pending, {"r": 1})
    assert admin.get("/dashboard/api/requests").status_code == 200
    with Client(redis_url) as client:
        assert client.timeline("r").request_id == "r"
