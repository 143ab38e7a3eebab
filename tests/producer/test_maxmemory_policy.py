"""Everything that shows a queue says that its server may delete requests; nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
import redis

from promptq import Client
from promptq.producer.jobs.leader import lead
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.errors import RedisFullError
from tests.producer.gateway.living import live_gateway, live_worker
from tests.producer.playing import Run
from tests.support.roles import as_role
from tests.support.servers import embedded_server
from tests.support.waiting import until


@pytest.fixture
def url() -> Iterator[str]:
    """A server whose memory no other test needs."""
    with embedded_server() as url:
        yield url


def test_everything_that_shows_the_queue_warns(
    url: str, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "maxmemory-policy allkeys-lru"
    with redis.Redis.from_url(url) as server:
        server.config_set("maxmemory", "1gb")
        server.config_set("maxmemory-policy", "allkeys-lru")
        with live_worker(as_role("worker", url)):
            assert said in "".join(capfd.readouterr()), "of the worker"
            with (
                live_gateway(as_role("gateway", url)) as gateway,
                httpx2.Client(timeout=None) as http,
            ):
                until(lambda: said in "".join(capfd.readouterr()))
                ready = http.get(f"{gateway.url}/readyz")
                assert (ready.status_code, said in ready.json()["warning"]) == (200, True)
                metrics = http.get(f"{gateway.url}/metrics").text
                assert 'promptq_queue_server_evicts{queue="default"} 1.0' in metrics
                path = f"{gateway.url}/dashboard/api/live/overview"
                with http.stream("GET", path) as page:
                    assert any(said in line for line in page.iter_lines() if "value" in line)
                server.config_set("maxmemory-policy", "noeviction")
                assert http.get(f"{gateway.url}/readyz").json() == {"status": "ready"}
        server.config_set("maxmemory-policy", "volatile-ttl")
    settings = JobsSettings(redis_url=as_role("jobs", url))
    turns = iter([False, True])
    lead(settings, lambda: next(turns))
    assert "maxmemory-policy volatile-ttl" in "".join(capfd.readouterr())
    for command in ("stats", "top"):
        shown = run(command, "--redis", as_role("operator", url)).stdout
        assert "maxmemory-policy volatile-ttl" in " ".join(shown.split())


def test_with_full_memory_only_new_requests_are_refused(url: str) -> None:
    producer = as_role("producer", url)
    with (
        redis.Redis.from_url(url) as server,
        Client(producer) as client,
        live_worker(as_role("worker", url)),
        live_gateway(as_role("gateway", url)) as gateway,
    ):
        request_id = client.enqueue("Hi", max_tokens=2000)
        stream = client.stream(request_id)
        tokens = len(next(stream).token_ids)
        server.config_set("maxmemory", 1)
        with pytest.raises(RedisFullError, match=r"memory .* is full .*accepts no request"):
            client.enqueue("Hi")
        answer = httpx2.post(f"{gateway.url}/v1/completions", json={"prompt": "Hi"}, timeout=None)
        assert answer.status_code == 503
        assert "memory" in answer.json()["error"]["message"]
        assert tokens + sum(len(event.token_ids) for event in stream) == 2000
