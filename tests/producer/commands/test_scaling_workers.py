"""Workers that come and go with the load, on this machine."""

from __future__ import annotations

import signal

import pytest

from promptq import Client
from promptq.shared.protocol.request import RequestState
from tests.processes import family_of, is_running, read_until
from tests.producer.playing import KEYS, PROMPTQ, HandWorker, Run, Start
from tests.waiting import until

WORKER = (*PROMPTQ, "worker", "--model", "model-free", "--max-num-seqs", "2")
TOKENS = 30


def forget_the_load(worker: HandWorker) -> None:
    """As if the last minute had passed."""
    worker.redis.delete(KEYS.statistics, KEYS.prefix + "statistics:open")


def test_supervise_starts_workers_for_work_and_ends_them_without(
    start: Start, own_worker: HandWorker, redis_url: str
) -> None:
    """From none to one that is needed and back; what runs is finished first."""
    process = start("supervise", "--workers", "0-2", "--", *WORKER)
    with Client(redis_url) as client:
        ids = client.enqueue_many([{"prompt": "Once", "max_tokens": TOKENS, "seed": 1}] * 8)
        assert "worker: 1 instead of 0, as one is enough" in read_until(process, "enough")
        results = [client.result(it, timeout=60) for it in ids]
        assert {len(it.token_ids) for it in results} == {TOKENS}
        family = family_of(process.pid)
        assert len(client.stats().workers) == 1
        until(lambda: forget_the_load(own_worker) or not client.stats().workers)
        assert "worker: 0 instead of 1, as nothing waits" in read_until(process, "waits")
    process.send_signal(signal.SIGTERM)
    process.wait()
    assert process.returncode == 0
    until(lambda: not any(map(is_running, family)))


@pytest.mark.parametrize("wrong", ["4-1", "-1", "many", "1-", "1-2-3", "99999"])
@pytest.mark.parametrize("command", [("up",), ("supervise",)])
def test_a_number_of_workers_that_is_none_is_refused(
    run: Run, command: tuple[str, ...], wrong: str
) -> None:
    refused = run(*command, f"--workers={wrong}", "--", "promptq", "worker")
    assert refused.returncode == 1
    assert refused.stderr == (
        f"promptq: --workers: {wrong!r} is not a number or a range, such as 2 or 1-4\n"
    )


def test_supervise_needs_a_command_that_starts_a_worker(run: Run) -> None:
    assert "-- promptq worker" in run("supervise").stderr
    failed = run("supervise", "--workers", "1", "--", "sh", "-c", "echo no model; exit 3")
    assert failed.returncode == 1
    assert "worker 1 ended with exit code 3; it said:\nno model" in failed.stderr


def test_up_adds_a_worker_for_a_backlog_and_ends_the_one_with_less_to_do(
    start: Start, own_worker: HandWorker, redis_url: str
) -> None:
    """A minute's work of one worker waits: that takes two. Nothing is lost when one leaves."""
    process = start("up", "--workers", "1-2", *WORKER[len(PROMPTQ) + 1 :])
    read_until(process, "ready after ")
    with Client(redis_url) as client:
        slow = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "seed": 1}
        long_ones = client.enqueue_many([slow] * 3)
        until(lambda: client.stats().active)
        rate = {"tokens_per_second": 100, "worker_tokens_per_second": 100, "waiting": 1}
        own_worker.redis.rpush(KEYS.prefix + "outputs", *["1 8000"] * 9)
        own_worker.redis.xadd(KEYS.statistics, rate)
        assert "worker: 2 instead of 1, as so much waits" in read_until(process, "waits")
        until(lambda: len(client.stats().workers) == 2)
        for request_id in long_ones[1:]:
            client.cancel(request_id)
        until(lambda: forget_the_load(own_worker) or len(client.stats().workers) == 1)
        assert client.state(long_ones[0]) is RequestState.RUNNING
        assert client.cancel(long_ones[0])
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
