"""Whether a gateway says that a request would be served."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx2
import pytest

from promptq import Client
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import RequestQueue
from tests.helpers import served_model_free
from tests.producer.gateway.living import LiveGateway, live_worker
from tests.producer.playing import HandWorker


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
    impatient: httpx2.Client, redis_url: str, own_worker: HandWorker
) -> None:
    queue: RequestQueue = own_worker.queue
    beat(queue, "running")
    assert impatient.get("/readyz").status_code == 200
    beat(queue, "draining")
    answer = impatient.get("/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_progress")


def beat(queue: RequestQueue, state: str) -> None:
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w", state=state), 60_000))
