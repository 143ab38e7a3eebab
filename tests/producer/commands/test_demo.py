"""`promptq demo`, in a pipe and in a terminal."""

from __future__ import annotations

import re
import signal
from contextlib import closing, suppress
from pathlib import Path

import pytest
import redis

from tests.producer.playing import KEYS, PROMPTQ, Run, Start
from tests.support.processes import Terminal, family_of, read_until

# So long that the endless request is still running when it is cancelled, on a busy machine too.
DEMO = ["demo", "--model", "model-free", "--max-model-len", "500000"]


def test_demo_in_a_pipe(run: Run) -> None:
    """Each finished text and both tables, one request cancelled in mid-stream."""
    done = run(*DEMO, url="")
    assert (done.returncode, done.stderr) == (0, "")
    texts = re.findall(r"^── (.+) \(priority [+-]\d+\): (\w+), (\d+) tokens ──$", done.stdout, re.M)
    assert len(texts) == 12
    [(title, tokens)] = [(text[0], int(text[2])) for text in texts if text[1] == "cancelled"]
    assert tokens >= 16
    assert re.search(rf"^ *{title} .* {tokens} .* cancelled", done.stdout, re.M)
    for fact in ("queued", "first token", "tokens/s", "requests processed", "peak memory"):
        assert fact in done.stdout


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (160, 45), (30, 8)])
def test_demo_in_a_terminal(environment: dict[str, str], columns: int, lines: int) -> None:
    """Panels that fit the terminal, then the tables."""
    del environment["COLUMNS"]
    command = [*PROMPTQ, *DEMO]
    with closing(Terminal(*command, columns=columns, lines=lines, env=environment)) as terminal:
        terminal.read_rest()
        assert terminal.process.wait() == 0
    text = terminal.plain
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= columns
    assert "12 done" in text
    assert "cancelled" in text


def url_of_worker(parent: int) -> str:
    """Returns the server's URL that the demo passes to its worker alone."""
    while True:
        for pid in family_of(parent):
            with suppress(OSError):  # it has just ended
                environment = Path(f"/proc/{pid}/environ").read_text()
                if found := re.search(r"(?:^|\0)PROMPTQ_REDIS_URL=([^\0]+)", environment):
                    return found[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_that_is_stopped_leaves_nothing(
    start: Start, number: signal.Signals, tmp_path: Path
) -> None:
    """Ctrl-C ends the server and the worker too."""
    process = start(*DEMO, url="", is_new=True)
    shown = re.search(r"redis://\S+", read_until(process, "/0\n"))
    assert shown is not None
    if number is signal.SIGTERM:
        with redis.Redis.from_url(url_of_worker(process.pid)) as connection:
            connection.hset(KEYS.config, "paused", 1)  # or it might be over before the signal
        read_until(process, "ready")
    process.send_signal(number)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    with redis.Redis.from_url(shown[0]) as connection, pytest.raises(redis.ConnectionError):
        connection.ping()


def test_demo_whose_worker_cannot_start(run: Run) -> None:
    """The reason is what the worker said."""
    done = run("demo", "--model", "/no/such/model", url="")
    assert done.returncode == 1
    assert "/no/such/model" in done.stderr
    assert "Traceback" not in done.stderr
