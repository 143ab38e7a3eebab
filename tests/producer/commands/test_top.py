"""`promptq top`: one frame in a pipe, a live one in a terminal until somebody leaves."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from promptq import Client
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.scripts import heartbeat
from tests.producer.playing import KEYS, PROMPTQ, Run
from tests.support.processes import Terminal


@pytest.fixture
def busy_queue(redis_url: str) -> Iterator[Client]:
    """Three wait, one is delayed, a worker lives, and of the last minute there are samples."""
    with redis.Redis.from_url(redis_url) as connection, Client(redis_url) as client:
        for priority in (0, 0, -5):
            client.enqueue("Once", priority=priority)
        client.enqueue("Once", delay_ms=60_000)
        worker = WorkerStats(
            worker_id="[b]w1[/b]", model="[/no]", max_num_seqs=8, num_running=5,
            kv_blocks=100, kv_used_blocks=40,
            recent_tokens_per_second=321.0, step_ms=12.0, num_preemptions=7,
            mean_prefetched=1.25, mean_prefetch_wait_ms=33.0, num_prefetch_empty=4321,
            refused="embed tool_choice",
        )  # fmt: skip
        RequestQueue(connection).run(heartbeat(worker, 60_000))
        sample = {"waiting": 30, "tokens_per_second": 300, "ttft_p50_ms": 44, "queue_p50_ms": 9}
        at = int(time.time() * 1000) - 10_000
        connection.xadd(KEYS.statistics, {"waiting": 10}, id=f"{at - 5_000}-0")
        connection.xadd(KEYS.statistics, sample, id=f"{at}-0")
        yield client


def test_in_a_pipe_it_prints_one_frame(run: Run, busy_queue: Client) -> None:
    busy_queue.pause()
    shown = run("top").stdout
    assert "queue default" in shown
    assert "paused" in shown
    assert re.search(r"3 +1 +5 of 8 +321 +44 ms +9 ms +0", shown)
    assert re.search(r"-5 +1 +█+ *\n", shown)
    assert re.search(r" 0 +2 +█+ *\n", shown)
    assert re.search(
        r"\[b\]w1\[/b\] +running +(now|\d+ s ago) +5 of 8 +40 of 100 +321 +12 ms +7", shown
    )
    assert re.search(r"preempted +prepared +slot wait +starved +refuses", shown)
    assert re.search(r" 7 +1\.2 +33 ms +4,321 +embed tool_choice", shown)
    assert re.search(r"waiting +\S+ +up to 30", shown)
    assert "\x1b" not in shown


def test_what_looks_like_markup_is_shown_as_it_is(run: Run, busy_queue: Client) -> None:
    shown = run("stats").stdout
    assert "[b]w1[/b]" in shown
    assert "[/no]" in shown


def test_stats_breaks_no_name_of_a_worker(run: Run, busy_queue: Client) -> None:
    """Workers that do not fit beside each other are in further tables."""
    names = [f"promptq-chat-7d9f8c6b5d-x2x4z-{nth}-a1b2c3" for nth in range(4)]
    for name in names:
        stats = WorkerStats(worker_id=name)
        RequestQueue(busy_queue.queue.redis).run(heartbeat(stats, 60_000))
    for columns, num_tables in (80, 5), (120, 3):
        shown = run("stats", COLUMNS=str(columns)).stdout
        assert all(shown.count(name) == 1 for name in names)
        assert shown.count("holds back because") == shown.count("peak memory") == num_tables
        assert max(map(len, shown.splitlines())) <= columns


def test_an_empty_queue(run: Run) -> None:
    shown = run("top", "--once").stdout
    assert "No worker is alive" in shown
    assert "–" in shown


@pytest.mark.parametrize("columns", [80, 40])
def test_a_narrow_terminal_shows_less_and_breaks_no_word(
    run: Run, busy_queue: Client, columns: int
) -> None:
    shown = run("top", COLUMNS=str(columns)).stdout
    assert max(map(len, shown.splitlines())) <= columns
    for whole in ("tokens/s", "first token", "queue time", "dead", "5 of 8", "[b]w1[/b]", "44 ms"):
        assert whole in shown
    assert ("step" in shown) == (columns == 80)
    assert "preempted" not in shown
    assert "starved" not in shown
    assert re.search(r"running +5 of 8" if columns == 40 else r"3 +1 +5 of 8", shown)
    assert re.search(r"queue time +.* +up to 9 ms", shown)
    assert re.search(r"waiting +\S+ +up to 30 *\n", shown), "the most there was, however wide it is"
    assert re.search(r"running +–\n|running .* up to 0", shown)


def test_a_long_name_of_a_worker_leaves_room_for_its_state(run: Run, busy_queue: Client) -> None:
    name = "promptq-chat-7d9f8c6b5d-x2x4z-worker-number-a1b2c3"
    stats = WorkerStats(worker_id=name, state="draining")
    RequestQueue(busy_queue.queue.redis).run(heartbeat(stats, 60_000))
    for columns in (60, 80, 150):
        shown = run("top", COLUMNS=str(columns)).stdout
        assert max(map(len, shown.splitlines())) <= columns
        assert re.search(r"promptq\S+a1b2c3 +draining", shown)
        assert (name in shown) == (columns == 150)


@pytest.fixture
def terminal(environment: dict[str, str], redis_url: str) -> Iterator[Terminal]:
    environment = {**environment, "PROMPTQ_REDIS_URL": redis_url, "TERM": "xterm", "LINES": "50"}
    with closing(Terminal(*PROMPTQ, "top", env=environment)) as terminal:
        yield terminal


def press_q(terminal: Terminal) -> None:
    terminal.press(b"xq")


def press_ctrl_c(terminal: Terminal) -> None:
    terminal.process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("leave", [press_q, press_ctrl_c])
def test_in_a_terminal_it_is_live_until_somebody_leaves(
    busy_queue: Client, terminal: Terminal, leave: Callable[[Terminal], Any]
) -> None:
    terminal.read_until(r"3 +1 +5 of 8")
    busy_queue.enqueue("Once")
    terminal.read_until(r"4 +1 +5 of 8")
    leave(terminal)
    assert terminal.process.wait() == 0
    terminal.read_until(re.escape("\x1b[?1049l"))  # the screen from before is back


INTERRUPTED = """
import os, signal
from {module} import {owner}
from promptq.producer.cli import main

whole, calls = {owner}.{method}, 0

def interrupted(self, *given):
    global calls
    calls += 1
    if calls == 500:
        os._exit(3)  # no interrupt was heeded
    os.kill(os.getpid(), signal.SIGINT)
    return whole(self, *given)

{owner}.{method} = interrupted
main()
"""


@pytest.mark.parametrize(
    ("module", "owner", "method"),
    [
        pytest.param("rich.console", "Console", "render", id="in a frame"),
        pytest.param("redis.client", "Pipeline", "__del__", id="in a finalizer, which swallows it"),
    ],
)
def test_an_interrupt_at_a_bad_moment_is_heeded_after_it(
    environment: dict[str, str], redis_url: str, module: str, owner: str, method: str
) -> None:
    environment = {**environment, "PROMPTQ_REDIS_URL": redis_url, "TERM": "xterm", "LINES": "50"}
    program = INTERRUPTED.format(module=module, owner=owner, method=method)
    with closing(Terminal(sys.executable, "-c", program, "top", env=environment)) as terminal:
        terminal.read_rest()
        assert terminal.process.wait() == 0
    assert re.search(r"waiting.*\x1b\[\?1049l", terminal.shown, re.DOTALL)


def test_a_terminal_that_cannot_draw_gets_one_frame(
    environment: dict[str, str], redis_url: str, busy_queue: Client
) -> None:
    environment = {**environment, "PROMPTQ_REDIS_URL": redis_url, "TERM": "dumb", "LINES": "50"}
    with closing(Terminal(*PROMPTQ, "top", env=environment)) as terminal:
        terminal.read_until(r"3 +1 +5 of 8")
        assert terminal.process.wait() == 0
    assert "\x1b" not in terminal.shown
