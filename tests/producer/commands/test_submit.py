"""`promptq submit`, `watch` and `cancel`: what they send, and what they say of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from promptq.shared.protocol.events import ErrorInfo
from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue.scripts import heartbeat
from tests.producer.playing import KEYS, PROMPTQ, HandWorker, Run, Start
from tests.support.processes import Terminal, read_until
from tests.support.requests import put
from tests.support.roles import as_role
from tests.support.servers import OwnServer


def test_submit_prints_the_text(start: Start, own_worker: HandWorker) -> None:
    """Tokens come as they are made, and a newline ends them; nothing else is printed."""
    process = start("submit", "Hi")
    claim = own_worker.take_next()
    own_worker.send(claim, "ab")
    assert read_until(process, "ab") == "ab"
    own_worker.finish(claim, "c")
    assert process.communicate() == ("c\n", "")
    assert process.returncode == 0


def test_submit_json(run: Run, own_worker: HandWorker) -> None:
    """One event a line, as the protocol has it."""
    with own_worker.finishing(["abc"]):
        done = run("submit", "Hi", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["text"] for event in events] == ["a", "bc"]
    assert events[-1]["finish_reason"] == "stop"


def test_submit_sends_the_fields(run: Run, own_worker: HandWorker) -> None:
    """Options are a payload's fields, and --param any other."""
    done = run(
        *("submit", "Hi", "--detach", "--id", "mine", "--max-tokens", "5", "--temperature", "0"),
        *("--top-p", "0.5", "--top-k", "3", "--seed", "7", "--stop", "x", "--stop", "y"),
        *("--priority", "-2", "--deadline-ms", "90000", "--param", 'metadata={"a": 1}'),
    )
    assert done.stdout == "mine\n"
    assert own_worker.payload("mine") == {
        "prompt": "Hi",
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "seed": 7,
        "stop": ["x", "y"],
        "priority": -2,
        "deadline_ms": 90000,
        "metadata": {"a": 1},
    }


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        (["Hi", "--chat"], {"messages": [{"role": "user", "content": "Hi"}]}),
        (
            ["Hi", "--system", "Be brief."],
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Hi"},
                ]
            },
        ),
        (["--param", "prompt=[1, 2]"], {"prompt": [1, 2]}),
        ([], {"prompt": "from a pipe"}),
        (["-"], {"prompt": "from a pipe"}),
    ],
)
def test_submit_prompts(
    run: Run, own_worker: HandWorker, args: list[str], fields: dict[str, Any]
) -> None:
    """A prompt is an argument, standard input, token ids or a chat message."""
    request_id = run("submit", "--detach", *args, stdin="from a pipe\n").stdout.strip()
    assert own_worker.payload(request_id) == fields


def test_watch_replays_and_follows(run: Run, start: Start, own_worker: HandWorker) -> None:
    """First what was, then what comes; and all of it again after the end."""
    request_id = run("submit", "--detach", "Hi").stdout.strip()
    claim = own_worker.take()
    own_worker.send(claim, "ab")
    process = start("watch", request_id)
    read_until(process, "ab")
    own_worker.finish(claim, "c")
    assert process.communicate() == ("c\n", "")
    assert run("watch", request_id).stdout == "abc\n"
    events = run("watch", request_id, "--json").stdout.splitlines()
    assert [json.loads(event)["index"] for event in events] == [0, 2]


@pytest.fixture
def at_terminal(environment: dict[str, str], redis_url: str) -> Callable[..., Terminal]:
    """Starts the command with a standard error at a terminal, and an output that nobody reads."""
    url = as_role("producer", redis_url)
    options = {"streams": ["stderr"], "stdout": subprocess.DEVNULL, "env": environment}
    return lambda *args: Terminal(*PROMPTQ, *args, "--redis", url, **options)


def test_reports_the_outcome_at_a_terminal(
    own_worker: HandWorker, at_terminal: Callable[..., Terminal]
) -> None:
    """A later watcher does not know how long the first token took."""

    def told(*args: str) -> str:
        with closing(at_terminal(*args)) as terminal:
            terminal.read_rest()
            assert terminal.process.wait() == 0
        return terminal.plain

    with own_worker.finishing(["abc"]):
        summary = told("submit", "Hi", "--id", "mine")
    assert re.fullmatch(r"stop · 3 tokens · first token after [\d.,]+ m?s\r\n", summary)
    assert told("watch", "mine") == "stop · 3 tokens\r\n"


def test_begins_at_a_terminal_with_the_prompt(
    run: Run, own_worker: HandWorker, environment: dict[str, str], redis_url: str
) -> None:
    """Dimmed, and escaped like all text; `watch` reads it from the record. JSON stays JSON."""

    def shown(*args: str) -> str:
        command = [*PROMPTQ, *args, "--redis", as_role("producer", redis_url)]
        with closing(Terminal(*command, env=environment | {"TERM": "xterm"})) as terminal:
            terminal.read_rest()
        return terminal.shown

    with own_worker.finishing(["abc"]):
        submitted = shown("submit", "Hi\x07 [bold]", "--id", "mine")
    assert submitted.startswith("\x1b[2mHi\\x07 [bold]\x1b[0mabc\r\n")
    assert shown("watch", "mine").startswith("\x1b[2mHi\\x07 [bold]\x1b[0mabc\r\n")
    assert shown("watch", "mine", "--json").startswith('{"index"')
    run("submit", "Hi", "--detach", "--id", "other")
    run("cancel", "other")
    assert "Hi\x1b[0m\r\npromptq: request other was cancelled" in shown("watch", "other")


@pytest.mark.parametrize(
    ("is_paused", "said"), [(False, "no worker is alive"), (True, "the queue is paused")]
)
def test_says_at_a_terminal_why_nothing_comes(
    own_worker: HandWorker, at_terminal: Callable[..., Terminal], is_paused: bool, said: str
) -> None:
    """With what to do about it, and once."""
    own_worker.redis.hset(KEYS.config, "paused", int(is_paused))
    with closing(at_terminal("submit", "Hi")) as terminal:
        terminal.read_until("\n")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_rest()
        assert terminal.process.wait() == 130
    told = f"promptq: the request waits: {said}.*\r\n.*cancelled.*\r\n"
    assert re.fullmatch(told, terminal.shown)


def test_says_at_a_terminal_how_many_wait_in_front(
    own_worker: HandWorker, at_terminal: Callable[..., Terminal]
) -> None:
    own_worker.queue.run(heartbeat(WorkerStats(worker_id="by-hand"), 600_000))
    put(own_worker.queue, "first")
    with closing(at_terminal("submit", "Hi")) as terminal:
        terminal.read_until("promptq: the request is waiting: 1 request waits in front, with about")
        assert own_worker.take().request_id == "first"
        terminal.read_until(
            "promptq: the request is waiting: next; the start is unknown: no output"
        )
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_rest()


def test_the_place_of_a_request(run: Run, own_worker: HandWorker) -> None:
    put(own_worker.queue, "first")
    put(own_worker.queue, "mine")
    shown = run("place", "mine").stdout
    assert re.fullmatch(
        r"waiting: 1 request waits in front, with about \d+ tokens;"
        r" the start is unknown: no worker is alive\n",
        shown,
    )
    place = json.loads(run("place", "mine", "--json").stdout)
    assert (place["id"], place["state"], place["in_front"]) == ("mine", "waiting", 1)
    own_worker.take()
    assert run("place", "first").stdout == "active: a worker holds the request\n"
    done = run("place", "unknown")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no request 'unknown' is known" in done.stderr


def test_says_that_no_replica_has_the_request(run: Run) -> None:
    done = run("submit", "Hi", "--id", "mine", "--durability", "replicated")
    assert done.returncode == 1
    assert "the request 'mine' is written, but the server has no replica" in done.stderr


def test_says_at_a_terminal_that_the_server_is_away(tmp_path: Path) -> None:
    """In the midst of a stream, and the stream goes on when the server is back.

    That the queue is paused does not matter to what runs.
    """
    with OwnServer(tmp_path) as server, server.client() as connection:
        worker = HandWorker(connection)
        worker.queue.run(heartbeat(WorkerStats(worker_id="by-hand"), 600_000))
        command = [*PROMPTQ, "submit", "Hi", "--redis", server.url]
        with closing(Terminal(*command)) as terminal:
            claim = worker.take_next()
            worker.send(claim, "ab")
            terminal.read_until("ab")
            connection.hset(KEYS.config, "paused", 1)
            server.kill()
            terminal.read_until("ab\r\npromptq: the server does not answer")
            server.start()
            worker.finish(claim, "c")
            terminal.read_rest()
            assert terminal.process.wait() == 0
    assert re.search(r"trying again for 60 s\r\nc\r\n.*stop · 3 tokens", terminal.plain)


def test_a_request_that_fails(run: Run, own_worker: HandWorker) -> None:
    """The reason is on standard error, and the exit code is 1."""
    request_id = run("submit", "--detach", "Hi").stdout.strip()
    error = ErrorInfo(type="invalid_request", message="prompt: is too long")
    own_worker.send(own_worker.take(), "", FinishReason.ERROR, error=error)
    done = run("watch", request_id)
    assert done.returncode == 1
    assert done.stderr == f"promptq: request {request_id} failed: {error.message} ({error.type})\n"


def test_a_request_that_expires(run: Run, own_worker: HandWorker) -> None:
    request_id = run("submit", "--detach", "Hi").stdout.strip()
    own_worker.send(own_worker.take(), "", FinishReason.EXPIRED)
    done = run("watch", request_id)
    assert done.returncode == 1
    assert done.stderr == f"promptq: request {request_id} expired after 0 tokens\n"


def test_cancel(run: Run, own_worker: HandWorker) -> None:
    """`cancel` prints the request's state; a command that follows the request exits with a code
    other than 0.
    """
    request_id = run("submit", "--detach", "Hi").stdout.strip()
    assert run("cancel", request_id).stdout == "cancelled\n"
    assert run("cancel", request_id).stdout == "nothing changed: the request has already ended\n"
    watched = run("watch", request_id)
    assert (watched.returncode, watched.stdout) == (1, "")
    assert watched.stderr == f"promptq: request {request_id} was cancelled after 0 tokens\n"


def test_submit_to_a_real_worker(run: Run, start: Start) -> None:
    """Equal seeds give equal texts, from the command to the worker and back."""
    process = start("worker", "--model", "model-free")
    read_until(process, "ready after ")
    texts = [run("submit", "Hi", "--max-tokens", "30", "--seed", "5").stdout for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 31
    process.terminate()
    process.wait()


def test_fork_sends_what_is_to_be_different(run: Run, own_worker: HandWorker) -> None:
    run("submit", "Hi", "--detach", "--id", "mine", "--max-tokens", "5", "--seed", "7")
    claim = own_worker.take()
    own_worker.send(claim, "abc")
    done = run(
        *("fork", "mine", "--at", "2", "--append", " z", "--id", "fork", "--temperature", "0"),
        *("--priority", "-2", "--param", 'metadata={"a": 1}', "--detach"),
    )
    assert done.stdout == "fork\n"
    assert own_worker.payload("fork") == {
        "prompt": "Hi",
        "max_tokens": 5,
        "temperature": 0.0,
        "priority": -2,
        "metadata": {"a": 1},
        "output_prefix": {"token_ids": [97, 98], "text": " z"},
    }
    assert own_worker.redis.hget(KEYS.request("fork"), "forked_from") == b"2 mine"
    wrong = run("fork", "mine", "--at", "4")
    assert wrong.returncode == 1
    assert "'mine' has 3 tokens so far" in wrong.stderr


def test_fork_prints_the_text(start: Start, run: Run, own_worker: HandWorker) -> None:
    """Of a source that waits, what it will begin with is kept."""
    given = 'output_prefix={"text": "Oh"}'
    run("submit", "Hi", "--detach", "--id", "mine", "--param", given)
    own_worker.take()
    process = start("fork", "mine", "--append", " no")
    claim = own_worker.take_next()
    assert own_worker.payload(claim.request_id)["output_prefix"] == {"text": "Oh no"}
    own_worker.finish(claim, "abc")
    assert process.communicate() == ("abc\n", "")
