"""A server that comes back with much to load answers LOADING meanwhile: it is waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from promptq import Client
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.model_free import text_of
from tests.support.processes import started
from tests.support.requests import KINDS, check_log, enqueue_in, num_tokens, read_in
from tests.support.servers import OwnServer
from tests.support.waiting import until

FAULTY = "tests.faults.worker.faulty_worker"


class SlowServer(OwnServer):
    """One that loads its data so slowly, when told to, that a test can look on."""

    def start_slowly(self) -> redis.Redis:
        """Start it again, a minute for all keys unless `finish_loading`; give a connection.

        Each key is longer than what is loaded between two answers.
        """
        with self.client() as client:
            with client.pipeline(transaction=False) as pipeline:
                for n in range(2000):
                    pipeline.set(f"other:{n}", os.urandom(1100))
                pipeline.execute()
            client.bgrewriteaof()  # a base of keys, during which the server answers
            until(lambda: is_rewritten(client.info("persistence")))
        self.kill()
        self.options += ["--key-load-delay", "30000", "--loading-process-events-interval-bytes"]
        self.options += ["1024"]
        self.start(wait=False)
        plain = redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0))
        until(lambda: is_loading(plain))
        return plain


def is_rewritten(info: dict[str, Any]) -> bool:
    return not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]


def is_loading(plain: redis.Redis) -> bool:
    """Whether the server answers LOADING; False while it does not answer yet."""
    try:
        plain.get("other:1")
    except redis.exceptions.BusyLoadingError:
        return True
    except redis.ConnectionError:
        return False
    raise AssertionError("the server has loaded all before anybody looked")


def until_one_is_refused(plain: redis.Redis, *commands: str) -> None:
    """Wait until the server, which loads meanwhile, has refused one of these commands."""

    def is_refused() -> bool:
        assert is_loading(plain)
        told = plain.info("commandstats")
        return any(told.get(f"cmdstat_{it}", {}).get("rejected_calls") for it in commands)

    until(is_refused)


def finish_loading(plain: redis.Redis) -> None:
    assert is_loading(plain)
    plain.config_set("key-load-delay", 0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SlowServer]:
    with SlowServer(tmp_path / "server") as server:
        yield server


@pytest.mark.parametrize("kind", KINDS)
def test_worker_and_stream_wait_for_a_server_that_loads(
    server: SlowServer, beside: ThreadPoolExecutor, tmp_path: Path, kind: str
) -> None:
    with (
        started(tmp_path, server.url, "--lease-ms", "60000", module=FAULTY) as worker,
        Client(server.url) as client,
        server.client() as own,
    ):
        queue = RequestQueue(own)
        request_id = client.enqueue("a", seed=1, max_tokens=500)
        reading = beside.submit(read_in, kind, server.url, request_id)
        until(lambda: num_tokens(queue, request_id) > 20)
        with server.start_slowly() as plain:
            until_one_is_refused(plain, "evalsha")  # the worker's
            # The stream's: it asks for the log if redis-py has connected again by itself.
            until_one_is_refused(plain, "hget", "xrange")
            finish_loading(plain)
        assert reading.result() == text_of(1, 500)
        log = check_log(queue, request_id, text_of(1, 500))
        assert {event["attempt"] for event in log} == {1}
        worker.terminate()
        assert worker.wait() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_enqueueing_waits_for_a_server_that_loads(
    server: SlowServer, beside: ThreadPoolExecutor, kind: str
) -> None:
    with server.start_slowly() as plain:
        enqueueing = beside.submit(enqueue_in, kind, server.url, request_id="mine")
        until_one_is_refused(plain, "evalsha")
        finish_loading(plain)
    assert enqueueing.result() == "mine"
    with Client(server.url) as client:
        assert client.state("mine") == "waiting"
