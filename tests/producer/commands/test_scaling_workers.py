"""Workers that come and go with the load, on this machine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from promptq import Client
from tests.producer.playing import KEYS, PROMPTQ, HandWorker, Run, Start
from tests.support.processes import family_of, is_running, read_until
from tests.support.waiting import until

WORKER = (*PROMPTQ, "worker", "--model", "model-free", "--max-num-seqs", "2")
SLOW_WORKER = "from tests.programs.chaos.processes.chaotic_worker import main; main()"
"""Its tokens take 20 ms each."""
TOKENS = 30


def forget_the_load(worker: HandWorker) -> None:
    """Pretend that the last minute has passed."""
    worker.redis.delete(KEYS.statistics, KEYS.prefix + "statistics:open")


def test_supervise_starts_workers_for_work_and_ends_them_without(
    start: Start, own_worker: HandWorker, redis_url: str
) -> None:
    """From none to one that is needed and back; what runs is finished first."""
    process = start("supervise", "--workers", "0-2", "--hold", "0", "--", *WORKER)
    with Client(redis_url) as client:
        ids = client.enqueue_many([{"prompt": "Once", "max_tokens": TOKENS, "seed": 1}] * 8)
        assert "worker: 1 instead of 0 (1 wanted, as one worker is enough)" in read_until(
            process, "enough)"
        )
        results = [client.result(it, timeout=60) for it in ids]
        assert {len(it.token_ids) for it in results} == {TOKENS}
        family = family_of(process.pid)
        assert len(client.stats().workers) == 1
        until(lambda: forget_the_load(own_worker) or not client.stats().workers)
        assert "worker: 0 instead of 1 (0 wanted, as nothing waits" in read_until(process, "waits")
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
    assert failed.stderr == "promptq: worker 1 ended with exit code 3; its last lines are above\n"
    assert failed.stdout.count("no model") == 1


def test_a_backlog_adds_a_worker_and_the_one_with_less_to_do_leaves(
    start: Start, own_worker: HandWorker, redis_url: str
) -> None:
    """A minute's work of one worker waits: that takes two. What runs is not touched at the end."""
    slow = (sys.executable, "-c", SLOW_WORKER, "--model", "model-free", "--max-num-seqs", "2")
    process = start("supervise", "--workers", "1-2", "--hold", "0", "--", *slow)
    read_until(process, "ready after ")
    own_worker.redis.rpush(KEYS.prefix + "outputs", "1 400")
    own_worker.redis.xadd(KEYS.statistics, {"worker_tokens_per_second": 100})
    with Client(redis_url) as client:
        endless = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "seed": 1}
        first, *others = client.enqueue_many([endless] * 20)
        assert "worker: 2 instead of 1 (" in read_until(process, "requests need them")
        until(lambda: len(client.stats().workers) == 2)
        for request_id in others:
            client.cancel(request_id)
        until(lambda: forget_the_load(own_worker) or len(client.stats().workers) == 1)
        # Its last report may be from before the others were cancelled.
        until(lambda: client.stats().workers[0].num_running < 2)
        assert [it.num_running for it in client.stats().workers] == [1], "the idle one left"
        client.cancel(first)
        events = list(client.stream(first))
        assert {it.attempt for it in events} == {1}
        assert events[-1].finish_reason == "cancelled", "it ran until then"
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 0
    assert "starts again" not in said, "one that was told to leave stays away"


def test_a_worker_that_does_not_start_leaves_the_others_alone(
    start: Start, own_worker: HandWorker, redis_url: str, tmp_path: Path
) -> None:
    """Such as for want of memory: there is none for a second one."""
    lock = tmp_path / "one"
    script = f'if mkdir {lock}; then exec "$@"; else echo out of memory; exit 1; fi'
    command = ("sh", "-c", script, "sh", sys.executable, "-c", SLOW_WORKER)
    process = start(
        *("supervise", "--workers", "1-2", "--hold", "0", "--", *command),
        *("--model", "model-free", "--max-num-seqs", "2"),
    )
    read_until(process, "ready after ")
    own_worker.redis.rpush(KEYS.prefix + "outputs", "1 400")
    own_worker.redis.xadd(KEYS.statistics, {"worker_tokens_per_second": 100})
    with Client(redis_url) as client:
        client.enqueue_many([{"prompt": "Once", "max_tokens": 600, "ignore_eos": True}] * 20)
        said = read_until(process, "the others continue without it")
        assert "worker 2 | out of memory" in said
        assert len(client.stats().workers) == 1
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0


def test_a_worker_that_was_killed_is_replaced_and_not_taken_for_somebody_elses(
    start: Start, redis_url: str
) -> None:
    process = start("supervise", "--workers", "0-1", "--hold", "0", "--", *WORKER)
    with Client(redis_url) as client:
        endless = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True}
        ids = client.enqueue_many([endless] * 40)
        read_until(process, "ready after ")
        [worker] = until(lambda: client.stats().workers)
        os.kill(worker.pid, signal.SIGKILL)
        read_until(process, "starts again in ")
        said = read_until(process, "ready after ")
        assert "instead of" not in said
        for request_id in ids:
            client.cancel(request_id)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0
