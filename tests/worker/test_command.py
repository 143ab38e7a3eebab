"""`python -m promptq.worker` as a process: it serves, and ends when it is told to."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.server.advertised import advertised
from promptq.shared.server.connection import without_password
from tests.support.model_free import text_of
from tests.support.processes import read_line, running, started
from tests.support.requests import num_tokens, put, result_of
from tests.support.waiting import until

COMMAND = [sys.executable, "-m", "promptq.worker"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_while_it_waits_for_a_server_ends_it(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        command = [*COMMAND, "--model", "model-free", "--redis", url, "--redis-wait", "3600"]
        with running(*command) as process:
            listener.accept()[0].close()  # it is there, and tries
            process.send_signal(number)
            assert process.wait() == 0


TOLD_AGAIN_AT_THE_END = """
import os, signal, sys
from promptq.worker import command
from promptq.worker.__main__ import main
serve = command.serve_until_stopped
def told_again(*args):
    serve(*args)
    os.kill(os.getpid(), signal.SIGTERM)
command.serve_until_stopped = told_again
main()
"""


def test_a_second_stop_signal_at_its_end_changes_no_exit_code(worker_url: str) -> None:
    """By an impatient supervisor, when all is given back and only the interpreter is left."""
    options = ["--model", "model-free", "--redis", worker_url]
    command = [sys.executable, "-c", TOLD_AGAIN_AT_THE_END, *options]
    with running(*command, stdout=subprocess.PIPE, text=True) as process:
        assert read_line(process).startswith("ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


LOADING_FOR_EVER = """
import sys, time
from promptq.worker.serve import process
from promptq.worker.__main__ import main
process.build = lambda *_: print("loading", flush=True) or time.sleep(3600)
main()
"""


def test_a_stop_signal_while_its_model_loads_ends_it(worker_url: str) -> None:
    """The thread that loads is not waited for."""
    command = [sys.executable, "-c", LOADING_FOR_EVER, "--redis", worker_url]
    with running(*command, stdout=subprocess.PIPE, text=True) as process:
        assert read_line(process) == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_serves_and_drains_when_terminated(redis_url: str, tmp_path: Path) -> None:
    with redis.Redis.from_url(redis_url) as client:
        queue = RequestQueue(client)
        with started(tmp_path, redis_url, "--model", "model-free") as worker:
            request_id = put(queue, seed=3, max_tokens=2000)
            until(lambda: num_tokens(queue, request_id))
            worker.terminate()
            assert worker.wait() == 0
        assert result_of(queue, request_id)["text"] == text_of(3, 2000)
        assert client.zcard(queue.keys.workers) == 0


def test_starts_an_own_server_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later commands find it, as they find that of `promptq up`."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PROMPTQ_REDIS_URL", raising=False)
    command = [*COMMAND, "--model", "model-free"]
    with running(*command, stdout=subprocess.PIPE, text=True) as process:
        first = read_line(process)
        found = advertised()
        assert found is not None
        where = without_password(found)
        assert first.startswith(f"no Redis given: started an embedded server at {where} (")
        assert read_line(process).startswith("ready after ")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    assert advertised() is None
