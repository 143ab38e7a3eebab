"""`promptq worker` as a process: it says what is wrong in one sentence, and ends as it is told."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis

from promptq.shared.errors import ModelNotFoundError
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.runtime.settings import read_settings
from promptq.shared.server.advertised import advertised
from promptq.shared.server.connection import without_password
from promptq.shared.server.embedded import EmbeddedServer
from promptq.worker.served_model import build
from tests.model_free_worker import text_of
from tests.processes import read_line, running, started
from tests.requests import check_log, log_of, num_tokens, put, result_of
from tests.roles import as_role
from tests.waiting import until

COMMAND = [sys.executable, "-m", "promptq.worker"]


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *options],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture
def worker_url(redis_url: str) -> str:
    return as_role("worker", redis_url)


def one_sentence(outcome: subprocess.CompletedProcess[str]) -> str:
    assert outcome.returncode == 1, outcome
    # Lines of the log tell of a slow machine's start; they are JSON.
    said = [line for line in outcome.stderr.splitlines() if not line.startswith("{")]
    assert len(said) == 1, outcome.stderr
    assert said[0].startswith("promptq worker: "), outcome.stderr
    return said[0]


def test_says_that_no_server_is_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        said = one_sentence(run("--model", "model-free", "--redis", f"redis://127.0.0.1:{port}"))
    assert f"no Redis server answers at redis://127.0.0.1:{port}" in said


def test_says_that_credentials_are_wrong_and_shows_no_password() -> None:
    with EmbeddedServer() as server:
        url = f"redis://:wr0ng@127.0.0.1:{server.port}/0"
        said = one_sentence(run("--model", "model-free", "--redis", url))
    assert "refused the credentials" in said
    assert "wr0ng" not in said


def test_says_that_a_server_is_too_old() -> None:
    """No binary that old is at hand: this server answers everything with its version."""
    reply = b"redis_version:6.2.14\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(4096):
                    for command in data.split(b"*")[1:]:
                        if b"HELLO" in command:
                            connection.sendall(b"%1\r\n+proto\r\n:3\r\n")
                        elif b"\r\nINFO\r\n" in command:
                            connection.sendall(b"$%d\r\n%s\r\n" % (len(reply), reply))
                        else:
                            connection.sendall(b"-ERR unknown subcommand\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        said = one_sentence(run("--model", "model-free", "--redis", f"redis://127.0.0.1:{port}"))
        thread.join()
    assert "is Redis 6.2.14; promptq needs Redis 7 or Valkey 8" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_while_it_waits_for_a_server_it_ends(number: signal.Signals) -> None:
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
serve = command._serve
def told_again(*args):
    serve(*args)
    os.kill(os.getpid(), signal.SIGTERM)
command._serve = told_again
main()
"""


def test_told_to_stop_again_as_it_ends_it_has_ended_well(worker_url: str) -> None:
    """By an impatient supervisor, when all is given back and only the interpreter is left."""
    options = ["--model", "model-free", "--redis", worker_url]
    command = [sys.executable, "-c", TOLD_AGAIN_AT_THE_END, *options]
    with running(*command, stdout=subprocess.PIPE, text=True) as process:
        assert read_line(process).startswith("ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


LOADING_FOR_EVER = """
import sys, time
from promptq.worker import command
from promptq.worker.__main__ import main
command.build = lambda *_: print("loading", flush=True) or time.sleep(3600)
main()
"""


def test_told_to_stop_while_it_loads_its_model_it_ends(worker_url: str) -> None:
    """The thread that loads is not waited for."""
    command = [sys.executable, "-c", LOADING_FOR_EVER, "--redis", worker_url]
    with running(*command, stdout=subprocess.PIPE, text=True) as process:
        assert read_line(process) == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_says_that_a_url_is_none() -> None:
    assert "is not a Redis URL" in one_sentence(run("--redis", "http://localhost"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--kv-cache-memory", "lots"], "--kv-cache-memory: 'lots' is not a size"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--dtype", "int3"], "--dtype"),
        (["--queue", "a b"], "queue: 'a b'"),
        (["--model", "model-free", "--max-num-batched-tokens", "8"], "--max-num-batched-tokens"),
    ],
)
def test_says_which_option_is_wrong(worker_url: str, options: list[str], expected: str) -> None:
    assert expected in one_sentence(run("--redis", worker_url, *options))


def test_says_which_variable_is_wrong(worker_url: str) -> None:
    said = one_sentence(run("--redis", worker_url, PROMPTQ_MAX_NUM_SEQS="many"))
    assert "PROMPTQ_MAX_NUM_SEQS" in said


def test_says_that_a_model_is_not_there_or_none(worker_url: str, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    assert str(missing) in one_sentence(run("--redis", worker_url, "--model", str(missing)))
    with pytest.raises(ModelNotFoundError, match=re.escape(str(tmp_path))):
        build(read_settings(model=str(tmp_path)))
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotFoundError, match="causal"):
        build(read_settings(model=str(tmp_path)))


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


def test_a_killed_workers_stream_is_carried_on(redis_url: str, tmp_path: Path) -> None:
    """No gap, no repeat, no changed token: the other worker goes on at the next one."""
    options = ["--model", "model-free", "--lease-ms", "300"]
    with redis.Redis.from_url(redis_url) as client:
        queue = RequestQueue(client)
        with started(tmp_path, redis_url, *options):
            request_id = put(queue, seed=8, max_tokens=6000)
            until(lambda: len(log_of(queue, request_id)) >= 20)
        with started(tmp_path, redis_url, *options):
            result_of(queue, request_id)
        log = check_log(queue, request_id, text_of(8, 6000))
        assert {event["attempt"] for event in log} == {1, 2}


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


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_what_options_take(option: str) -> None:
    shown = " ".join(run(option).stdout.split())
    assert "--log-level debug|info|warning|error" in shown
    assert "--async-scheduling true|false" in shown
    assert "waits for the server to answer [default: 0.0]" in shown


def test_starts_without_torch() -> None:
    code = "import sys, promptq.worker.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
