"""Strangers' text is shown at a terminal, and moves nothing there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import closing

import pytest

from promptq import Client
from promptq.producer.commands.screens.demo_view import Shown, finished_text
from promptq.producer.commands.screens.terminal import SafeConsole
from promptq.shared.protocol.events import ErrorInfo
from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.scripts import heartbeat
from tests.producer.playing import KEYS, PROMPTQ, HandWorker, old_server
from tests.support.processes import Terminal
from tests.support.roles import as_role

HOSTILE = "a\x1b]0;owned\x07b\x1b[666mc\x9b777md\u202ee\u2066f\rg\x7fh\x08i\x85j"
"""A title, two colours that nobody has, an order, an overwriting, and more that acts."""

ESCAPED = r"a\x1b]0;owned\x07b\x1b[666mc\x9b777md\u202ee\u2066f\x0dg\x7fh\x08i\x85j"
DRAWN = ESCAPED.replace(r"\x07", "").replace(r"\x0d", "").replace(r"\x08", "")
"""Where rich lays it out, which leaves out some of it."""

MARKUP = "[bold]m[/bold][link=http://x]n[/link][/no] :boom:"

At = Callable[..., str]


def check_that_nothing_acts(shown: str) -> None:
    """Control codes that rich itself writes do not count."""
    assert "\x1b]" not in shown
    assert "\x1b[666m" not in shown
    assert not set("\x07\x08\r\x7f\x85\x9b\u202e\u2066") & set(shown)


@pytest.fixture
def at_terminal(redis_url: str, tmp_path: os.PathLike[str]) -> At:
    """Runs a command at a terminal; gives what came there, and checks that nothing acted."""

    def run(*args: str) -> str:
        environment = {**os.environ, "PROMPTQ_REDIS_URL": as_role("operator", redis_url)}
        environment |= {"TERM": "xterm", "COLUMNS": "300", "LINES": "60"}
        with closing(Terminal(*PROMPTQ, *args, env=environment)) as terminal:
            terminal.read_rest()
        text = terminal.shown.replace("\r\n", "\n")
        check_that_nothing_acts(text)
        return text

    return run


def answer(own_worker: HandWorker, redis_url: str, text: str, **fields: object) -> None:
    """The request `mine` is over, with this text."""
    with Client(redis_url) as client:
        client.enqueue("Once", request_id="mine", max_tokens=999)
    claim = own_worker.take()
    own_worker.send(claim, text)
    ending = FinishReason.ERROR if "error" in fields else FinishReason.STOP
    own_worker.send(claim, "", ending, **fields)


def test_the_text_of_a_model(at_terminal: At, own_worker: HandWorker, redis_url: str) -> None:
    """Its lines and tabs stay."""
    answer(own_worker, redis_url, f"{HOSTILE}\n\tnext {MARKUP}")
    shown = at_terminal("watch", "mine")
    assert f"{ESCAPED}\n" in shown
    assert f"next {MARKUP}" in shown
    assert r"\u001b]0;owned" in at_terminal("watch", "mine", "--json")


def test_the_text_of_a_model_in_a_pipe(own_worker: HandWorker, redis_url: str) -> None:
    """A program gets what the model wrote."""
    answer(own_worker, redis_url, HOSTILE)
    environment = {**os.environ, "PROMPTQ_REDIS_URL": redis_url}
    done = subprocess.run([*PROMPTQ, "watch", "mine"], capture_output=True, env=environment)
    assert done.stdout == f"{HOSTILE}\n".encode()
    asked = [*PROMPTQ, "watch", "mine", "--json"]
    done = subprocess.run(asked, capture_output=True, env=environment)
    events = [json.loads(line) for line in done.stdout.split(b"\n") if line]
    assert "".join(event["text"] for event in events) == HOSTILE


def test_the_message_of_an_error(at_terminal: At, own_worker: HandWorker, redis_url: str) -> None:
    error = ErrorInfo(type="x", message=f"{HOSTILE}{MARKUP}")
    answer(own_worker, redis_url, "text", error=error)
    assert f"failed: {DRAWN}{MARKUP} (x)" in at_terminal("watch", "mine")
    environment = {**os.environ, "PROMPTQ_REDIS_URL": redis_url}
    done = subprocess.run([*PROMPTQ, "watch", "mine"], capture_output=True, env=environment)
    assert DRAWN.encode() in done.stderr, "it may become a line of a log"


def test_what_workers_say_of_themselves(at_terminal: At, own_worker: HandWorker) -> None:
    """Whoever may write to the queue may be any worker and name any model."""
    stats = WorkerStats(
        worker_id=f"w{HOSTILE}{MARKUP}", model=f"m{HOSTILE}{MARKUP}", device=f"d{HOSTILE}",
        state=f"s{HOSTILE}", dtype=MARKUP, max_num_seqs=8,
    )  # fmt: skip
    RequestQueue(own_worker.redis).run(heartbeat(stats, 60_000))
    own_worker.redis.hset(KEYS.config, "model", f"c{HOSTILE}{MARKUP}")
    shown = at_terminal("stats")
    for column in ("w", "m", "c"):
        assert rf"{column}a\x1b]0;owned" in shown
    shown = at_terminal("top", "--once")
    assert r"wa\x1b]0;owned" in shown
    assert f"model c{DRAWN}{MARKUP}" in shown
    assert r"wa\u001b]0;owned" in at_terminal("stats", "--json")
    assert f"w{ESCAPED}{MARKUP} finishes" in at_terminal("drain")


def test_what_is_kept_of_a_dead_letter(
    at_terminal: At, own_worker: HandWorker, redis_url: str
) -> None:
    with Client(redis_url) as client:
        client.enqueue("Once", request_id="mine", metadata={"x": f"{HOSTILE}{MARKUP}"})
    own_worker.redis.hset(KEYS.config, "crash_backoff_ms", "0")
    own_worker.queue = RequestQueue(own_worker.redis, worker_id=f"w{HOSTILE}", max_crashes=1)
    while own_worker.queue.state("mine") != "dead":
        claim = own_worker.take()
        own_worker.redis.zadd(KEYS.leases, {claim.request_id: 1})
        own_worker.queue.reap()
    payload = f'{{"prompt":"Once{HOSTILE}{MARKUP}"}}'
    own_worker.redis.hset(KEYS.request("mine"), "payload", payload)
    assert r"Oncea\x1b]0;owned" in at_terminal("dead", "list")
    shown = at_terminal("dead", "show", "mine")
    assert f"on w{ESCAPED}" in shown
    assert f"Once{ESCAPED}{MARKUP}" in shown


def test_what_a_server_answers(at_terminal: At) -> None:
    """Errors repeat it."""
    with old_server(f"6.{HOSTILE.replace(chr(13), '')}") as url:
        shown = at_terminal("stats", "--redis", url)
    assert shown.startswith("promptq: ")
    assert r"Redis 6.a\x1b]0;owned\x07b\x1b[666mc\x9b777md\u202ee" in shown


def test_a_character_that_an_encoding_lacks(own_worker: HandWorker, redis_url: str) -> None:
    """A command does not fail at such a character."""
    answer(own_worker, redis_url, "caf\u00e9 \u2013 \u202e")
    environment = {**os.environ, "PROMPTQ_REDIS_URL": redis_url, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([*PROMPTQ, "watch", "mine"], capture_output=True, env=environment)
    assert (done.returncode, done.stdout) == (0, b"caf\xe9 \\u2013 \\u202e\n")


def test_everything_that_is_drawn() -> None:
    """Also inside of what rich lays out itself."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = SafeConsole(width=200, force_terminal=True, legacy_windows=False)
    table = Table(title=Text(HOSTILE))
    table.add_column(Text(HOSTILE))
    table.add_row(Panel(Text(HOSTILE), title=Text(HOSTILE)))
    with console.capture() as captured:
        console.print(table)
        console.print(finished_text(Shown("t", 0, HOSTILE)))
        console.out(f"child | {HOSTILE}", highlight=False)
        console.print("[bold]ours[/]")
    shown = captured.get()
    check_that_nothing_acts(shown)
    assert "\x1b[1mours" in shown, "its own styles remain"
