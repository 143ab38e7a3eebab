"""Ctrl-C, and a reader that goes away, while the command streams."""

from __future__ import annotations

import re
import signal
import threading

from tests.producer.playing import KEYS, HandWorker, Run, Start
from tests.support.processes import read_until
from tests.support.waiting import until


def test_ctrl_c_in_submit_cancels(start: Start, own_worker: HandWorker) -> None:
    """The request ends at its worker's next step, and the command says after how much."""
    process = start("submit", "Hi")
    claim = own_worker.take_next()
    own_worker.send(claim, "ab")
    read_until(process, "ab")
    process.send_signal(signal.SIGINT)
    until(lambda: own_worker.redis.hget(KEYS.request(claim.request_id), "cancelled"))
    own_worker.send(claim, "more")
    assert process.communicate() == ("\n", "promptq: cancelled after 2 tokens\n")
    assert process.returncode == 130


def test_ctrl_c_while_waiting(start: Start, own_worker: HandWorker) -> None:
    """A request that no worker holds ends at once."""
    process = start("submit", "Hi", "--id", "mine")
    channel = KEYS.events("mine")
    until(lambda: dict(own_worker.redis.pubsub_numsub(channel))[channel.encode()])
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "promptq: cancelled after 0 tokens\n")
    assert process.returncode == 130
    assert own_worker.queue.is_empty()


def test_ctrl_c_in_watch_leaves_the_request_alone(
    run: Run, start: Start, own_worker: HandWorker
) -> None:
    """Only the watching ends."""
    request_id = run("submit", "--detach", "Hi").stdout.strip()
    claim = own_worker.take()
    own_worker.send(claim, "ab")
    process = start("watch", request_id)
    read_until(process, "ab")
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("\n", "")
    assert process.returncode == 130
    assert not own_worker.redis.hexists(KEYS.request(request_id), "cancelled")


def test_a_reader_that_goes_away_cancels(start: Start, own_worker: HandWorker) -> None:
    """`promptq submit ... | head` leaves no request behind that nobody reads."""
    process = start("submit", "Hi")
    claim = own_worker.take_next()
    own_worker.send(claim, "ab")
    read_until(process, "ab")
    assert process.stdout is not None
    process.stdout.close()
    own_worker.send(claim, "c")
    until(lambda: own_worker.redis.hget(KEYS.request(claim.request_id), "cancelled"))
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 141
    process.stdout = None


def test_ctrl_c_with_a_real_worker(run: Run, start: Start) -> None:
    """A request in mid-stream is cancelled, and its worker goes on with others."""
    worker = start("worker", "--model", "model-free")
    read_until(worker, "ready after ")
    process = start("submit", "Hi", "--param", "ignore_eos=true", "--id", "long")
    drained = threading.Thread(target=lambda: process.stdout and process.stdout.read())
    assert process.stdout is not None
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    drained.start()
    assert process.stderr is not None
    assert re.fullmatch(r"promptq: (cancelled|length) after \d+ tokens\n", process.stderr.read())
    drained.join()
    assert process.wait() == 130
    assert run("submit", "Hi", "--max-tokens", "3").returncode == 0
    worker.terminate()
    worker.wait()
