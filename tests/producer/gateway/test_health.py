"""Whether a gateway says that a request would be served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx2
import pytest
import redis

from promptq import Client
from promptq.producer.calls import errors
from promptq.shared.protocol.keys import ALL_QUEUES
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.server.acl import user_rules
from tests.producer.gateway.living import LiveGateway, live_gateway, live_worker
from tests.producer.playing import HandWorker
from tests.support.model_free import served_model_free
from tests.support.roles import as_role
from tests.support.servers import free_port
from tests.support.waiting import until


@pytest.fixture
def impatient(start_gateway: Callable[..., LiveGateway]) -> Iterator[httpx2.Client]:
    """A client of a gateway that waits for no step of more than a quarter of a second."""
    gateway = start_gateway(http_ready_seconds=0.25)
    with httpx2.Client(base_url=gateway.url, timeout=30) as http:
        yield http


def wait_for(http: httpx2.Client, status: int) -> httpx2.Response:
    while (answer := http.get("/readyz")).status_code != status:
        pass
    return answer


def test_readiness_needs_a_worker_that_gets_on(impatient: httpx2.Client, redis_url: str) -> None:
    """One whose heart beats but whose step does not end is none."""
    assert wait_for(impatient, 503).json()["error"]["code"] == "no_worker"
    with live_worker(redis_url, served_model_free(step_seconds=1.5)), Client(redis_url) as client:
        wait_for(impatient, 200)
        request_id = client.enqueue("Hi", max_tokens=1000)
        assert wait_for(impatient, 503).json()["error"]["code"] == "no_progress"
        assert impatient.head("/readyz").status_code == 503
        assert impatient.head("/healthz").status_code == 200
        client.cancel(request_id)
        wait_for(impatient, 200)


def test_a_worker_that_drains_takes_no_request(
    impatient: httpx2.Client, own_worker: HandWorker
) -> None:
    queue: RequestQueue = own_worker.queue
    beat(queue, "running")
    assert impatient.get("/readyz").status_code == 200
    beat(queue, "draining")
    answer = impatient.get("/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_progress")


@pytest.mark.parametrize(("state", "status"), [("draining", 200), ("no_server", 503)])
def test_a_model_that_is_loaded_in_its_turn_takes_requests(
    impatient: httpx2.Client, own_worker: HandWorker, state: str, status: int
) -> None:
    own_worker.redis.hset(own_worker.queue.keys.model, "standby_until", 2**53)
    assert impatient.get("/readyz").status_code == 200
    beat(own_worker.queue, state)
    assert impatient.get("/readyz").status_code == status


@pytest.mark.parametrize("queues", [["default"], ["*"], ["default", "b"]])
def test_the_next_call_sees_what_readiness_promises(
    start_gateway: Callable[..., LiveGateway], redis_url: str, queues: list[str]
) -> None:
    """The model and its further names; and once nobody works, no call that will not wait."""
    url = start_gateway(queues=["default", *queues]).url
    with httpx2.Client(base_url=url, timeout=30) as http, Client(redis_url) as client:

        def called(model: str) -> int:
            fields = {"model": model, "prompt": "Hi", "max_tokens": 2, "wait_for_worker": False}
            return http.post("/v1/completions", json=fields).status_code

        assert http.get("/v1/models").json()["data"] == []
        with live_worker(redis_url, served_model_free(name="owl"), queue="default"):
            wait_for(http, 200)
            assert [it["id"] for it in http.get("/v1/models").json()["data"]] == ["owl"]
            assert called("owl") == 200
            client.set_alias("bird", "owl")
            wait_for(http, 200)
            assert called("bird") == 200
        wait_for(http, 503)
        assert called("owl") == 503


def beat(queue: RequestQueue, state: str) -> None:
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w", state=state), 60_000))


@pytest.mark.parametrize("password", ["right", "wrong"])
def test_a_gateway_with_the_url_of_another_role_says_so(
    redis_url: str, capfd: pytest.CaptureFixture[str], password: str
) -> None:
    errors._log_refusal.cache_clear()
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        rules = user_rules("producer", ALL_QUEUES, "right")
        server.execute_command("ACL", "SETUSER", "somebody", *rules)
        parts = urlsplit(redis_url)
        url = f"redis://somebody:{password}@{parts.hostname}:{parts.port}/0"
        with live_worker(redis_url, served_model_free()), live_gateway(url) as gateway:
            for path in ("/readyz", "/readyz", "/v1/models"):
                refused = httpx2.get(gateway.url + path, timeout=30)
                assert refused.status_code == 503
                assert "refuses the gateway" in refused.text
        server.execute_command("ACL", "DELUSER", "somebody")
    out, err = capfd.readouterr()
    [line] = [it for it in (out + err).splitlines() if "the user 'gateway' (promptq acl)" in it]
    assert "the user 'somebody'" in line
    assert ("permissions" if password == "right" else "invalid") in line


def test_a_gateway_without_a_server_logs_why_before_any_call(
    capfd: pytest.CaptureFixture[str],
) -> None:
    errors._log_absence.cache_clear()
    port, told = free_port(), ""

    def is_told() -> bool:
        nonlocal told
        told += "".join(capfd.readouterr())
        return "calls get 503" in told

    with live_gateway(f"redis://default:secret@127.0.0.1:{port}/0"):
        until(is_told)
    [line] = [it for it in told.splitlines() if "calls get 503" in it]
    assert f"no Redis server answers at redis://127.0.0.1:{port}:" in line
    assert "secret" not in line
