"""Engines that hang, fail or run short of memory, in real worker processes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from promptq.shared.protocol.request import RequestState
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.model_free import assert_texts, text_of
from tests.support.processes import started
from tests.support.requests import check_log, log_of, new, num_tokens, put, result_of
from tests.support.waiting import until

FAULTY = "tests.faults.worker.faulty_worker"


@pytest.fixture
def queue(redis_url: str) -> Iterator[RequestQueue]:
    with redis.Redis.from_url(redis_url) as client:
        yield RequestQueue(client)


def put_together(queue: RequestQueue, *requests: dict[str, Any]) -> list[str]:
    """In one call, so that one claim finds them all."""
    return queue.enqueue([new(**it) for it in requests])


@pytest.mark.parametrize("fault", ["hang", "hang-with-lock"])
def test_a_worker_whose_engine_hangs_loses_its_leases_and_exits_with_an_error(
    queue: RequestQueue, redis_url: str, tmp_path: Path, fault: str
) -> None:
    lease_ms = "60000" if fault == "hang" else "1000"  # then they are given back, not left
    options = ["--lease-ms", lease_ms, "--stuck-seconds", "1.5"]
    innocent = put(queue, seed=1, max_tokens=3000)
    environment = {"FAULT": fault, "FAULT_FOR": "3600"}
    with started(tmp_path, redis_url, *options, module=FAULTY, **environment) as worker:
        until(lambda: num_tokens(queue, innocent) > 20)
        guilty = put(queue, prompt="!", seed=2, max_tokens=3)
        assert worker.wait() == 1
        if fault == "hang":
            assert "promptq worker: the engine has made no progress for 1.5 s" in worker.said
            assert len(worker.logged("the engine hangs; giving all requests back")) == 1
            for request_id in (innocent, guilty):
                record = queue.run(lookups.record(queue.keys, request_id))
                assert (record["state"], record["crashes"]) == ("waiting", "1")
        else:
            assert "Timeout (" in worker.said
            assert "in launch" in worker.said, "where it hangs"
    with started(tmp_path, redis_url, *options, "--model", "model-free"):
        assert result_of(queue, innocent)["text"] == text_of(1, 3000)
        assert result_of(queue, guilty)["text"] == text_of(2, 3)
    check_log(queue, innocent, text_of(1, 3000))


def test_a_worker_that_was_frozen_for_longer_than_that_exits_when_it_wakes(
    queue: RequestQueue, redis_url: str, tmp_path: Path
) -> None:
    """Another one has its requests by then. Its threads run while it says where they are, which
    may end it by a signal before it comes to code 1."""
    request_id = put(queue, seed=1, max_tokens=500)
    options = ["--lease-ms", "500", "--stuck-seconds", "0.4"]
    with started(tmp_path, redis_url, *options, module=FAULTY) as worker:
        until(lambda: num_tokens(queue, request_id) > 20)
        worker.process.send_signal(signal.SIGSTOP)
        time.sleep(1)
        with started(tmp_path, redis_url, "--lease-ms", "500", module=FAULTY):
            until(lambda: log_of(queue, request_id)[-1]["attempt"] == 2)
            worker.process.send_signal(signal.SIGCONT)
            assert worker.wait() != 0
            assert result_of(queue, request_id)["text"] == text_of(1, 500)
    check_log(queue, request_id, text_of(1, 500))


def test_a_step_that_takes_longer_than_a_lease_loses_nothing(
    queue: RequestQueue, redis_url: str, tmp_path: Path
) -> None:
    """A long prefill or a compilation may take longer than a lease."""
    environment = {"FAULT": "hang", "FAULT_FOR": "0.7"}
    with started(tmp_path, redis_url, "--lease-ms", "300", module=FAULTY, **environment):
        slow, other = put(queue, prompt="!", seed=1, max_tokens=4), put(queue, max_tokens=4)
        for request_id in (slow, other):
            result = result_of(queue, request_id)
            assert (result["finish_reason"], result["stats"]["attempts"]) == ("length", 1)


@pytest.mark.parametrize("prompt", ["!", "!" + " " * 40_000], ids=["quick", "long"])
def test_a_preparation_that_hangs_is_a_crash_of_that_request_alone(
    queue: RequestQueue, redis_url: str, tmp_path: Path, prompt: str
) -> None:
    """The worker gives the others back, with their progress, and exits."""
    options = ["--lease-ms", "60000", "--stuck-seconds", "1"]
    environment = {"FAULT": "hang-in-preparation", "FAULT_FOR": "3600"}
    innocent = put(queue, seed=1, max_tokens=2000)
    with started(tmp_path, redis_url, *options, module=FAULTY, **environment) as worker:
        until(lambda: num_tokens(queue, innocent) > 20)
        guilty, beside = put(queue, prompt=prompt, seed=2, max_tokens=3), put(queue, priority=9)
        assert worker.wait() == 1
        assert "the preparation of a request has made no progress for 1 s" in worker.said
        (told,) = worker.logged("the preparation of a request hangs")
        assert told["request_id"] == guilty
    crashes = {
        request_id: queue.run(lookups.record(queue.keys, request_id)).get("crashes")
        for request_id in (innocent, guilty, beside)
    }
    assert crashes == {innocent: None, guilty: "1", beside: None}
    with started(tmp_path, redis_url, *options, "--model", "model-free"):
        assert result_of(queue, innocent)["text"] == text_of(1, 2000)
        ended = result_of(queue, guilty)
        if len(prompt) == 1:
            assert ended["text"] == text_of(2, 3)
        else:
            assert ended["error"]["code"] == "context_length_exceeded"
    check_log(queue, innocent, text_of(1, 2000))


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_preparation_that_hangs_is_noticed_after_its_request_has_ended(
    queue: RequestQueue, redis_url: str, tmp_path: Path, how: str
) -> None:
    """Otherwise requests that were claimed with it would be held for ever. Nobody is to blame."""
    options = ["--lease-ms", "800", "--stuck-seconds", "3"]
    environment = {"FAULT": "hang-in-preparation", "FAULT_FOR": "3600"}
    deadline_ms = 1000 if how == "expired" else None
    with started(tmp_path, redis_url, *options, module=FAULTY, **environment) as worker:
        before, guilty, behind = put_together(
            queue,
            {"prompt": "a", "seed": 1, "max_tokens": 5},
            {"prompt": "!", "deadline_ms": deadline_ms},
            {"prompt": "b", "seed": 2, "max_tokens": 5},
        )
        until(lambda: "a fault begins" in worker.said)
        if how == "cancelled":
            queue.cancel(guilty)
        assert result_of(queue, guilty)["finish_reason"] == how
        assert worker.wait() == 1
        assert "the preparation of a request has made no progress for 3 s" in worker.said
        (told,) = worker.logged("the preparation of a request hangs")
        assert told["request_id"] == guilty
    for request_id in (before, behind):
        record = queue.run(lookups.record(queue.keys, request_id))
        assert (record["state"], record.get("crashes")) == ("waiting", None)
    with started(tmp_path, redis_url, *options, "--model", "model-free"):
        assert result_of(queue, before)["text"] == text_of(1, 5)
        assert result_of(queue, behind)["text"] == text_of(2, 5)


def test_a_stopping_worker_does_not_wait_for_a_preparation_that_hangs(
    queue: RequestQueue, redis_url: str, tmp_path: Path
) -> None:
    """Running requests finish, even if that takes longer than `--stuck-seconds`."""
    options = ["--lease-ms", "60000", "--stuck-seconds", "1", "--max-model-len", "8000"]
    environment = {"FAULT": "hang-in-preparation", "FAULT_FOR": "3600", "STEP_SECONDS": "0.01"}
    running = put(queue, seed=1, max_tokens=300)
    with started(tmp_path, redis_url, *options, module=FAULTY, **environment) as worker:
        until(lambda: num_tokens(queue, running) > 5)
        claimed = put_together(queue, {"prompt": "!"}, {"prompt": "b"})
        until(lambda: "a fault begins" in worker.said)
        worker.terminate()
        assert worker.wait() == 0
        assert not worker.logged("hangs")
    assert result_of(queue, running)["text"] == text_of(1, 300)
    for request_id in claimed:
        record = queue.run(lookups.record(queue.keys, request_id))
        assert (record["state"], record.get("crashes")) == ("waiting", None)


def test_an_engine_that_hangs_while_its_worker_drains_is_noticed_too(
    queue: RequestQueue, redis_url: str, tmp_path: Path
) -> None:
    environment = {"FAULT": "hang", "FAULT_FOR": "3600"}
    options = ["--stuck-seconds", "1.5", "--drain-seconds", "3600"]
    with started(tmp_path, redis_url, *options, module=FAULTY, **environment) as worker:
        put(queue, prompt="!", max_tokens=3)
        until(lambda: "a fault begins" in worker.said)
        worker.terminate()
        assert worker.wait() == 1
        assert "made no progress" in worker.said


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("fails", "the engine cannot compute it: bad sampling state"),
        ("nan", "no finite logits"),
        ("detokenise", "its output failed: a stop string bug"),
    ],
)
def test_what_belongs_to_one_request_fails_that_one_alone(
    queue: RequestQueue, redis_url: str, tmp_path: Path, fault: str, reason: str
) -> None:
    with started(tmp_path, redis_url, module=FAULTY, FAULT=fault) as worker:
        innocents = [put(queue, seed=n, max_tokens=100) for n in range(63)]
        until(lambda: num_tokens(queue, innocents[0]) > 3)
        result = result_of(queue, put(queue, prompt="!", seed=3, max_tokens=9))
        assert result["finish_reason"] == "error"
        assert result["error"] == {"type": "internal_error", "message": reason}
        for n, request_id in enumerate(innocents):
            result = result_of(queue, request_id)
            assert (result["text"], result["stats"]["attempts"]) == (text_of(n, 100), 1)
        worker.terminate()
        assert worker.wait() == 0


def test_a_step_that_is_out_of_memory_is_computed_in_smaller_parts(
    queue: RequestQueue, redis_url: str, tmp_path: Path
) -> None:
    with started(tmp_path, redis_url, module=FAULTY, FAULT="memory") as worker:
        prompts = ["x" * 200, *("y" * n for n in range(1, 60))]
        requests = [put(queue, prompt=it, seed=n, max_tokens=20) for n, it in enumerate(prompts)]
        assert_texts(queue, requests, 20)
        assert worker.logged("a step failed")
        worker.terminate()
        assert worker.wait() == 0


def test_memory_that_is_short_for_everything_for_a_while_fails_nobody(
    queue: RequestQueue, redis_url: str, tmp_path: Path
) -> None:
    environment = {"FAULT": "memory-for-all", "FAULT_FOR": "0.3"}
    with started(tmp_path, redis_url, module=FAULTY, **environment) as worker:
        requests = [put(queue, prompt="!", seed=n, max_tokens=100) for n in range(9)]
        assert_texts(queue, requests, 100)
        assert worker.logged("a step failed")
        worker.terminate()
        assert worker.wait() == 0


def test_memory_that_is_short_for_everything_and_for_good_ends_the_worker_and_no_request(
    queue: RequestQueue, redis_url: str, tmp_path: Path
) -> None:
    environment = {"FAULT": "memory-for-all", "FAULT_FOR": "3600"}
    requests = [put(queue, prompt="!", seed=n, max_tokens=1000) for n in range(5)]
    with started(tmp_path, redis_url, module=FAULTY, **environment) as worker:
        assert worker.wait() == 1
        assert "out of memory" in worker.said
    assert sum(num_tokens(queue, it) for it in requests) > 0
    with started(tmp_path, redis_url, "--model", "model-free"):
        assert_texts(queue, requests, 1000, attempts=2)


def test_one_that_needs_too_much_memory_goes_on_elsewhere_and_nobody_else_notices(
    queue: RequestQueue, redis_url: str, tmp_path: Path
) -> None:
    """The request goes back with its progress, which counts as its crash; the worker stays."""
    large = put(queue, prompt="!", seed=7, max_tokens=100)
    innocents = [put(queue, seed=n, max_tokens=200) for n in range(5)]
    options = ["--drain-seconds", "0", "--max-crashes", "1000"]  # it comes back to this worker too
    with started(tmp_path, redis_url, *options, module=FAULTY, FAULT="memory-for-one") as worker:
        for n, request_id in enumerate(innocents):
            result = result_of(queue, request_id)
            assert (result["text"], result["stats"]["attempts"]) == (text_of(n, 200), 1)
        until(lambda: worker.logged("there is too little memory even for a single request"))
        worker.terminate()
        assert worker.wait() == 0
    assert num_tokens(queue, large) > 0
    assert "crashes" in queue.run(lookups.record(queue.keys, large))
    with started(tmp_path, redis_url, "--model", "model-free"):
        assert result_of(queue, large)["text"] == text_of(7, 100)
    check_log(queue, large, text_of(7, 100))


def test_one_that_needs_too_much_memory_everywhere_becomes_a_dead_letter(
    queue: RequestQueue, redis_url: str, tmp_path: Path
) -> None:
    """Tried again alone, and then no more."""
    large = put(queue, prompt="!", seed=7, max_tokens=100)
    options = ["--max-crashes", "2"]
    with started(tmp_path, redis_url, *options, module=FAULTY, FAULT="memory-for-one") as worker:
        result = result_of(queue, large)
        assert result["error"]["type"] == "dead_letter"
        assert 0 < len(result["token_ids"]) < 100
        assert queue.state(large) is RequestState.DEAD
        history = json.loads(queue.run(lookups.record(queue.keys, large))["history"])
        assert [attempt["how"] for attempt in history] == ["crashed", "crashed alone"]
        assert result_of(queue, put(queue, seed=1, max_tokens=9))["text"] == text_of(1, 9)
        worker.terminate()
        assert worker.wait() == 0


def test_a_worker_whose_engine_is_broken_exits_and_others_go_on(
    queue: RequestQueue, redis_url: str, tmp_path: Path
) -> None:
    options = ["--lease-ms", "500"]
    innocent = put(queue, seed=1, max_tokens=3000)
    with started(tmp_path, redis_url, *options, module=FAULTY, FAULT="breaks") as worker:
        until(lambda: num_tokens(queue, innocent) > 20)
        guilty = put(queue, prompt="!", seed=2, max_tokens=3)
        assert worker.wait() == 1
        assert "device-side assert" in worker.said
    with started(tmp_path, redis_url, *options, "--model", "model-free"):
        assert result_of(queue, guilty)["text"] == text_of(2, 3)
        assert result_of(queue, innocent)["text"] == text_of(1, 3000)
    check_log(queue, innocent, text_of(1, 3000))
