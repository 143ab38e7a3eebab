"""`promptq worker` with several models: real processes, of which one has its model loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

from promptq import Client
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import RequestState
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue
from promptq.worker.shipped import MODEL_DIR
from tests.producer.gateway.living import LiveGateway, live_gateway
from tests.support.model_free import text_of
from tests.support.processes import family_of, run, running, started
from tests.support.requests import check_log, new, num_tokens, put, result_of
from tests.support.roles import as_role
from tests.support.waiting import until

COMMAND = [sys.executable, "-m", "promptq.worker"]
BOTH = ["--model", "model-free", "--model", "model-free", "--queue", "a", "--queue", "b"]
OFTEN = ["--swap-least-seconds", "0", "--swap-longest-wait", "0.2"]
LONG = 2000
"""Tokens of a request that runs for seconds."""

Queues = tuple[RequestQueue, RequestQueue]


@pytest.fixture
def queues(redis_url: str) -> Iterator[Queues]:
    with redis.Redis.from_url(redis_url) as client:
        yield RequestQueue(client, "a"), RequestQueue(client, "b")


def models_of(queues: Queues) -> list[list[Any]]:
    """The workers that each queue has now."""
    found = []
    for queue in queues:
        now_ms = queue.run(lookups.server_time_ms())
        ids = queue.run(lookups.live_worker_ids(queue.keys, now_ms))
        told = [queue.run(lookups.worker_stats(queue.keys, each)) for each in ids]
        found.append([it for it in told if it is not None])
    return found


def until_alone(queues: Queues, at: int) -> None:
    """Until one queue's model is loaded and the other's process has left, which may still serve
    what it had claimed."""
    until(lambda: [len(it) for it in models_of(queues)] == [1 - at, at])


def is_complete(queue: RequestQueue, request_id: str) -> bool:
    return queue.run(lookups.state(queue.keys, request_id)) is RequestState.COMPLETED


def num_open(queue: RequestQueue) -> int:
    """How many wait or run."""
    return queue.run(lookups.count(queue.keys)) + queue.redis.zcard(queue.keys.leases)


def assert_whole(queue: RequestQueue, request_id: str, seed: int, length: int) -> None:
    """Checks that the stream has all its tokens, once each."""
    until(lambda: is_complete(queue, request_id))
    check_log(queue, request_id, text_of(seed, length))


def test_each_queue_gets_its_model_when_it_has_work(
    redis_url: str, queues: Queues, tmp_path: Path
) -> None:
    with started(tmp_path, redis_url, *BOTH) as worker:
        assert [len(it) for it in models_of(queues)] == [1, 0], "the first one is loaded at once"
        for n, at in enumerate((1, 0, 1)):
            assert_whole(queues[at], put(queues[at], seed=n, max_tokens=20), n, 20)
            until_alone(queues, at)
        swaps = worker.logged("another model")
        assert [it["loads"] for it in swaps] == [
            f"model-free (queue {name})" for name in ("b", "a", "b")
        ]
        assert {it["because"] for it in swaps} == {"it has work, and nothing waits for the other"}


def test_a_queue_whose_model_is_not_loaded_counts_as_served(
    redis_url: str, queues: Queues, tmp_path: Path
) -> None:
    """With no model loaded at all, too; and no longer once the worker has ended."""
    asked = {"model": "model-free", "prompt": "Hi", "max_tokens": 4, "wait_for_worker": False}

    def statuses(gateway: LiveGateway) -> tuple[int, int]:
        answer = httpx2.post(f"{gateway.url}/v1/completions", json=asked, timeout=60)
        return answer.status_code, httpx2.get(f"{gateway.url}/readyz", timeout=None).status_code

    with (
        live_gateway(redis_url, queues=["b"]) as gateway,
        Client(as_role("operator", redis_url), "b") as client,
    ):
        with started(tmp_path, redis_url, *BOTH, "--swap-idle-seconds", "0.1") as worker:
            until(lambda: models_of(queues) == [[], []] and client.stats().has_standby)
            told = [(it.name, [view.has_worker for view in it.queues]) for it in client.models()]
            assert told == [("model-free", [True, True])]
            with pytest.raises(ConfigurationError, match="loads 'model-free' when its turn comes"):
                client.forget_model("model-free")
            assert statuses(gateway) == (200, 200)
            worker.terminate()
            assert worker.wait() == 0
        until(lambda: not client.stats().has_standby)
        assert statuses(gateway) == (503, 503)


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("overlap", ["--swap-overlap", "--no-swap-overlap"])
def test_under_load_nothing_is_lost_and_nothing_comes_twice(
    redis_url: str, queues: Queues, tmp_path: Path, overlap: str
) -> None:
    """Streams that a drain cannot finish go on when their model is back."""
    options = [*BOTH, *OFTEN, overlap, "--drain-seconds", "0.1", "--max-num-seqs", "2"]
    with started(tmp_path, redis_url, *options) as worker:
        wanted = []
        while len(worker.logged("another model")) < 4:
            seed = len(wanted)
            wanted += [(queue, put(queue, seed=seed, max_tokens=LONG), seed) for queue in queues]
            until(lambda: sum(map(num_open, queues)) < 10)
        for queue, request_id, seed in wanted:
            assert_whole(queue, request_id, seed, LONG)
        worker.terminate()
        assert worker.wait() == 0


def test_without_work_none_is_loaded_until_work_comes(
    redis_url: str, queues: Queues, tmp_path: Path
) -> None:
    with started(tmp_path, redis_url, *BOTH, "--swap-idle-seconds", "0.1") as worker:
        until(lambda: models_of(queues) == [[], []])
        assert_whole(queues[1], put(queues[1], seed=1, max_tokens=9), 1, 9)
        assert worker.logged("another model")[0]["loads"] == "none"


def test_a_model_whose_process_is_killed_goes_on(
    redis_url: str, queues: Queues, tmp_path: Path
) -> None:
    options = [*BOTH, "--lease-ms", "1000"]
    with started(tmp_path, redis_url, *options) as worker:
        request_id = put(queues[0], seed=7, max_tokens=LONG)
        until(lambda: num_tokens(queues[0], request_id))
        [[serving], _] = models_of(queues)
        os.kill(serving.pid, signal.SIGKILL)
        assert_whole(queues[0], request_id, 7, LONG)
        [told] = worker.logged("a model's process ended")
        assert told["error"] == "exit code -9"


def test_a_delayed_request_gets_its_model_when_it_is_due(
    redis_url: str, queues: Queues, tmp_path: Path
) -> None:
    with started(tmp_path, redis_url, *BOTH, "--lease-ms", "1000"):
        [request_id] = queues[1].enqueue([new(delay_ms=300, seed=5, max_tokens=9)])
        assert_whole(queues[1], request_id, 5, 9)


def test_what_a_killed_process_held_gets_its_model_back(
    redis_url: str, queues: Queues, tmp_path: Path
) -> None:
    """Even if another model has its place, so that no worker of the queue is there to reap."""
    with started(tmp_path, redis_url, *BOTH, "--lease-ms", "1000") as worker:
        request_id = put(queues[1], seed=7, max_tokens=LONG)
        until(lambda: num_tokens(queues[1], request_id))
        until_alone(queues, 1)
        [_, [serving]] = models_of(queues)
        os.kill(serving.pid, signal.SIGKILL)
        other = put(queues[0], seed=8, max_tokens=20)
        assert_whole(queues[0], other, 8, 20)
        changes = [change["loads"] for change in worker.logged("another model")]
        assert "model-free (queue a)" in changes
        assert_whole(queues[1], request_id, 7, LONG)


def test_the_processes_end_with_their_owner(redis_url: str, queues: Queues, tmp_path: Path) -> None:
    """They drain, as they have lost whom to ask."""
    with started(tmp_path, redis_url, *BOTH) as worker:
        family = family_of(worker.process.pid)
        assert len(family) >= 4, "the owner, the two models, and what forks them"
        request_id = put(queues[0], seed=7, max_tokens=LONG)
        until(lambda: num_tokens(queues[0], request_id))
        worker.process.kill()
        worker.wait()
        assert_whole(queues[0], request_id, 7, LONG)
        until(lambda: not any(map(lives, family)))


def lives(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_second_signal_gives_back_what_runs(
    redis_url: str, queues: Queues, tmp_path: Path
) -> None:
    options = [*BOTH, "--drain-seconds", "3600", "--max-num-seqs", "256"]
    with started(tmp_path, redis_url, *options) as worker:
        request_ids = [put(queues[0], seed=n, max_tokens=8000) for n in range(256)]
        until(lambda: num_tokens(queues[0], request_ids[0]))
        worker.terminate()
        until(lambda: any(it.state == "draining" for it in models_of(queues)[0]))
        worker.terminate()
        assert worker.wait() == 0
        given_back = [it for it in request_ids if not is_complete(queues[0], it)]
        assert any(num_tokens(queues[0], it) for it in given_back)


@pytest.mark.long
def test_a_real_model_beside_another_and_probes_of_both(
    redis_url: str, queues: Queues, tmp_path: Path
) -> None:
    """Clients find both models before both were loaded."""
    with started(
        tmp_path, redis_url, "--model", str(MODEL_DIR), "--model", "model-free", *BOTH[4:],
        "--health-port", "0",
    ) as worker:  # fmt: skip
        assert all(queue.redis.hget(queue.keys.model, "model") for queue in queues)
        for at in (1, 0):
            result_of(queues[at], put(queues[at], max_tokens=5))
            until_alone(queues, at)
        told = [it["ready"] for it in worker.logged("a model is loaded")]
        assert len(told) == 3
        assert "checking 0.0 s" in told[-1], "it was checked when it was loaded first"
        url = worker.first_line.rpartition("probes at ")[2].strip()
        for path in ("startupz", "livez", "readyz"):
            with urllib.request.urlopen(f"{url}/{path}") as answer:
                assert answer.status == 200


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--model", "model-free", "--model", "/no/such", "--queue", "a", "--queue", "b"],
            "such (queue b): /no/such: there is no such directory, and a hub name is like"
            " owner/name",
        ),
        (
            ["--model", "model-free", "--model", "model-free", "--queue", "a", "--queue", "a"],
            "--queue: two models would have one queue",
        ),
        (
            ["--model", "model-free", "--model", "model-free", "--queue", "a"],
            "--queue: give one for each --model (queues: 1, models: 2)",
        ),
        (["--queue", "a", "--queue", "b"], "--queue: give one for each --model"),
        ([*BOTH, "--swap-longest-wait", "0"], "--swap-longest-wait (PROMPTQ_SWAP_LONGEST_WAIT):"),
    ],
)
def test_unservable_models_are_reported_in_a_sentence(
    worker_url: str, options: list[str], sentence: str
) -> None:
    command = [*COMMAND, "--redis", worker_url, *options]
    done = run(*command)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2


def test_a_queue_of_another_model_is_refused(
    worker_url: str, redis_url: str, queues: Queues, tmp_path: Path
) -> None:
    with started(tmp_path, redis_url, "--queue", "b"):
        pass
    with running(*COMMAND, "--redis", worker_url, *BOTH, stderr=subprocess.PIPE, text=True) as it:
        _, told = it.communicate()
        assert it.returncode == 1
        assert "(queue b): the queue is served by workers of the model 'promptq-stories'" in told
