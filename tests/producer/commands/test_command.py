"""The `promptq` command as a user runs it: a process with arguments, pipes and signals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from promptq.shared.protocol.events import ErrorInfo
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import FinishReason
from promptq.shared.server.connection import without_password
from promptq.shared.server.embedded import EmbeddedServer
from tests.ports import free_port
from tests.processes import family_of, running
from tests.processes import start as start_process
from tests.producer.playing import PROMPTQ, HandWorker, Run, Start, old_server
from tests.roles import as_role
from tests.waiting import until

KEYS = Keys("default")


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Standard output up to and including `text`."""
    assert process.stdout is not None
    read = ""
    while not read.endswith(text):
        letter = process.stdout.read(1)
        if not letter:
            raise AssertionError(f"it ended after {read!r}: {process.communicate()[1]}")
        read += letter
    return read


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def payload_of(worker: HandWorker, request_id: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(worker.redis.hget(KEYS.request(request_id), "payload"))
    return fields


def test_submit_prints_the_text(start: Start, own_worker: HandWorker) -> None:
    """Tokens come as they are made, and a newline ends them; nothing else is printed."""
    process = start("submit", "Hi")
    claim = own_worker.queue.take()
    assert claim is not None
    own_worker.adopt(claim)
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
    assert payload_of(own_worker, "mine") == {
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
    assert payload_of(own_worker, request_id) == fields


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


def test_tells_at_a_terminal_how_it_went(
    own_worker: HandWorker, environment: dict[str, str], redis_url: str
) -> None:
    """Who watches later does not know how long the first token took."""

    def told(*args: str) -> str:
        ours, theirs = pty.openpty()
        url = as_role("producer", redis_url)
        command = [*PROMPTQ, *args, "--redis", url]
        with running(
            *command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment
        ) as process:
            os.close(theirs)
            seen = b""
            while chunk := _read_terminal(ours):
                seen += chunk
        os.close(ours)
        assert process.returncode == 0
        return re.sub(r"\x1b\[[0-9;]*m", "", seen.decode())

    with own_worker.finishing(["abc"]):
        summary = told("submit", "Hi", "--id", "mine")
    assert re.fullmatch(r"stop · 3 tokens · first token after [\d.,]+ m?s\r\n", summary)
    assert told("watch", "mine") == "stop · 3 tokens\r\n"


def test_ctrl_c_in_submit_cancels(start: Start, own_worker: HandWorker) -> None:
    """The request ends at its worker's next step, and the command says after how much."""
    process = start("submit", "Hi")
    claim = own_worker.queue.take()
    assert claim is not None
    own_worker.adopt(claim)
    own_worker.send(claim, "ab")
    read_until(process, "ab")
    process.send_signal(signal.SIGINT)
    until(lambda: own_worker.redis.hget(KEYS.request(claim.request_id), "cancelled"))
    own_worker.send(claim, "more")
    assert process.communicate() == ("\n", "promptq: cancelled after 2 tokens\n")
    assert process.returncode == 130


def test_ctrl_c_while_waiting(start: Start, own_worker: HandWorker) -> None:
    """What no worker has yet is over at once."""
    process = start("submit", "Hi", "--id", "mine")
    channel = KEYS.events("mine")
    until(lambda: dict(own_worker.redis.pubsub_numsub(channel))[channel.encode()])
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "promptq: cancelled after 0 tokens\n")
    assert process.returncode == 130
    assert own_worker.queue.is_empty()


@pytest.mark.parametrize(
    ("is_paused", "said"), [(False, "no worker is alive"), (True, "the queue is paused")]
)
def test_says_at_a_terminal_why_nothing_comes(
    own_worker: HandWorker,
    environment: dict[str, str],
    redis_url: str,
    is_paused: bool,
    said: str,
) -> None:
    """With what to do about it, and once."""
    own_worker.redis.hset(KEYS.config, "paused", int(is_paused))
    ours, theirs = pty.openpty()
    process = start_process(
        *[*PROMPTQ, "submit", "Hi", "--redis", as_role("producer", redis_url)],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    seen = b""
    while b"\n" not in seen:
        seen += _read_terminal(ours)
    process.send_signal(signal.SIGINT)
    while chunk := _read_terminal(ours):
        seen += chunk
    os.close(ours)
    assert process.wait() == 130
    assert re.fullmatch(f"promptq: the request waits: {said}.*\r\n.*cancelled.*\r\n", seen.decode())


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
    claim = own_worker.queue.take()
    assert claim is not None
    own_worker.adopt(claim)
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
    """It says what became of the request; whoever follows it sees an exit code other than 0."""
    request_id = run("submit", "--detach", "Hi").stdout.strip()
    assert run("cancel", request_id).stdout == "cancelled\n"
    assert run("cancel", request_id).stdout == "it had already ended\n"
    watched = run("watch", request_id)
    assert (watched.returncode, watched.stdout) == (1, "")
    assert watched.stderr == f"promptq: request {request_id} was cancelled after 0 tokens\n"


def test_stats(run: Run) -> None:
    """Counts, for people and for programs."""
    run("submit", "--detach", "Hi")
    found = json.loads(run("stats", "--json").stdout)
    assert (found["waiting"], found["active"], found["workers"]) == (1, 0, [])
    table = run("stats").stdout
    assert "waiting" in table
    assert "No worker is alive" in table


def test_settings(run: Run) -> None:
    """Every setting with what it is now, and no password."""
    env = {
        "PROMPTQ_MAX_NUM_SEQS": "7",
        "PROMPTQ_REDIS_URL": "redis://me:hush@host:1/0",
        "PROMPTQ_JOBS_REDIS_URL": "redis://me:hush@host:2/0",
        "PROMPTQ_WEBHOOK_SECRET": "whsec_hush",
    }
    listed = run("settings", "--json", **env).stdout
    rows = {row["variable"]: row for row in json.loads(listed)}
    slots = rows["PROMPTQ_MAX_NUM_SEQS"]
    assert (slots["value"], slots["default"], slots["option"]) == (7, 64, "--max-num-seqs")
    assert rows["PROMPTQ_REDIS_URL"]["value"] == "redis://me:***@host:1/0"
    assert rows["PROMPTQ_JOBS_REDIS_URL"]["value"] == "redis://me:***@host:2/0"
    processes = {rows[f"PROMPTQ_{name}"]["process"] for name in ("QUEUE", "MODEL")}
    assert processes == {None}
    assert rows["PROMPTQ_HTTP_PORT"]["process"] == "gateway"
    assert rows["PROMPTQ_BATCH_WORKERS"]["process"] == "jobs"
    assert rows["PROMPTQ_FILES_DIR"]["process"] == "gateway, jobs"
    shown = run("settings", COLUMNS="80", **env).stdout
    assert set(re.findall(r"PROMPTQ_\w+", shown)) == set(rows)
    assert "hush" not in listed + shown
    assert "PROMPTQ_MAX_NUM_SEQS  7  (default 64)\n" in shown
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    assert all(row["description"] in words for row in rows.values()), "no word is broken"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["submit", "Hi", "--temperature", "9"], "temperature: .*less than or equal to 2.* 9.0"),
        (["submit", "Hi", "--param", "nonsense=1"], "nonsense: is not a field of a request"),
        (["submit", "Hi", "--param", "stop=x"], "stop: 'x' is not JSON"),
        (["submit", "Hi", "--param", "stop"], "--param: 'stop' is not FIELD=JSON"),
        (["submit", "Hi", "--id", "two words"], "id: 'two words' is not"),
        (["submit"], "prompt: is empty"),
        (["submit", "Hi", "--queue", "no such"], "queue: 'no such' is not"),
        (["watch", "nobody"], "no request 'nobody' is known"),
        (["cancel", "nobody"], "no request 'nobody' is known"),
        (["stats", "--redis", "nowhere"], "'nowhere' is not a Redis URL"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(run: Run, args: list[str], said: str) -> None:
    """Exit code 1, one line on standard error, nothing on standard output."""
    done = run(*args)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(f"promptq: .*{said}.*\n", done.stderr)


def test_wrong_usage(run: Run) -> None:
    """Exit code 2, with a hint."""
    done = run("submit", "--nonsense")
    assert done.returncode == 2
    assert "--nonsense" in done.stderr
    assert run("nonsense").returncode == 2


def test_a_wrong_setting(run: Run) -> None:
    """The variable is named."""
    done = run("stats", PROMPTQ_LOG_LEVEL="loud")
    assert done.returncode == 1
    assert "PROMPTQ_LOG_LEVEL" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_server(run: Run) -> None:
    """Neither given nor started: it says how to get one."""
    done = run("stats", url="")
    assert done.returncode == 1
    assert re.fullmatch("promptq: there is no Redis server.*promptq up.*\n", done.stderr)


def test_a_server_that_is_not_there(run: Run) -> None:
    """One sentence with the address and without the password."""
    done = run("stats", url=f"redis://:secret@127.0.0.1:{free_port()}/0")
    assert done.returncode == 1
    assert re.fullmatch("promptq: no Redis server answers at .*\n", done.stderr)
    assert "secret" not in done.stderr


def test_wrong_credentials(run: Run) -> None:
    """Told apart from a server that is not there."""
    with EmbeddedServer() as server:
        for url, said in (
            (as_role("", server.url), "wants a user and a password, and the address has none"),
            (as_role("", server.url) + "?protocol=2", "and the address has none"),
            (server.url.replace(server.password, "wrong"), "refused the credentials"),
        ):
            done = run("stats", url=url)
            assert done.returncode == 1
            assert re.fullmatch(f"promptq: .*{said}.*\n", done.stderr)
            assert "wrong@" not in done.stderr


def test_a_server_too_old(run: Run) -> None:
    """Its version is named."""
    with old_server("6.2.14") as url:
        done = run("stats", url=url)
    assert done.returncode == 1
    assert re.fullmatch(r"promptq: .*Redis 6\.2\.14; promptq needs Redis 7.*\n", done.stderr)


def test_help_is_light(environment: dict[str, str]) -> None:
    """Help and every command but a worker come without torch and transformers."""
    code = (
        "import sys, contextlib, io; from promptq.producer.commands.app import app\n"
        "from promptq.producer.commands.local_fleet import demo, up\n"
        "for name in ('--help', 'submit --help', 'up --help'):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        app(name.split(), standalone_mode=False)\n"
        "    assert 'Usage' in out.getvalue()\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command", ["up", "worker", "gateway", "server", "submit", "watch", "cancel", "stats"]
)
def test_help_shows_examples(run: Run, command: str) -> None:
    """Each command's help has an example to paste."""
    assert re.search(rf"Examples:\s+promptq {command}", run(command, "--help").stdout)


def test_worker_passes_everything_on(run: Run, start: Start, own_worker: HandWorker) -> None:
    """`promptq worker` is the worker: same options, same signals."""
    described = run("worker", "--help").stdout
    assert "--max-num-seqs" in described
    assert max(map(len, described.splitlines())) <= 80
    process = start("worker", "--model", "model-free", "--queue", "other")
    assert "queue other" in read_until(process, "\n")
    control = Keys("other").control
    until(lambda: dict(own_worker.redis.pubsub_numsub(control))[control.encode()])
    process.terminate()
    assert process.wait() == 0


def test_up_serves_and_ends_cleanly(run: Run, start: Start, tmp_path: Path) -> None:
    """One terminal runs all of it; another finds it without an address; Ctrl-C leaves nothing."""
    port = free_port()
    options = ["--model", "model-free", "--workers", "2", "--port", str(port)]
    process = start("up", *options, url="", PROMPTQ_FILES_DIR=str(tmp_path / "files"))
    welcome = read_until(process, "stops all of it.\n")
    url = run("url", url="").stdout.strip()
    assert without_password(url) in welcome
    assert str(urlsplit(url).password) not in welcome
    assert 'redis-cli -u "$(promptq url)" ' in welcome
    assert f"http://127.0.0.1:{port}/ is the dashboard" in welcome
    not_ready = {"worker 1", "worker 2", "gateway", "jobs"}
    while not_ready:
        name, _, said = read_until(process, "\n").partition(" | ")
        if said.startswith("ready"):
            not_ready.remove(name)
    asked = json.dumps({"prompt": "Hi", "max_tokens": 3}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", asked) as answer:
        assert len(json.load(answer)["choices"][0]["text"]) == 3
    with redis.Redis.from_url(url) as connection:
        until(lambda: connection.exists(KEYS.upkeep))  # which is the jobs' work
    assert run("submit", "Hi", "--max-tokens", "3", "--seed", "1", url="").stdout != ""
    workers = json.loads(run("stats", "--json", url="").stdout)["workers"]
    assert len(workers) == 2
    family = family_of(process.pid)
    assert {worker["pid"] for worker in workers} < set(family)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    until(lambda: not any(map(is_alive, family)))
    assert "there is no Redis server" in run("stats", url="").stderr


def test_up_uses_a_server_that_is_there(start: Start, own_worker: HandWorker) -> None:
    """With a URL it starts workers alone; they take their leave, and the server stays."""
    process = start("up", "--model", "model-free")
    welcome = read_until(process, "stops all of it.\n")
    assert "(yours)" in welcome
    assert "off  (--port 8000: gateway, dashboard and jobs, too)" in welcome
    read_until(process, "ready after ")
    process.terminate()
    process.communicate()
    assert process.returncode == 0
    assert own_worker.redis.zcard(KEYS.workers) == 0


@pytest.mark.parametrize("has_own_server", [True, False])
def test_up_that_is_killed_leaves_nothing(run: Run, start: Start, has_own_server: bool) -> None:
    """Server and workers end with their owner, however it ends; a server of the user's stays."""
    where = {"url": ""} if has_own_server else {}
    process = start("up", "--model", "model-free", **where)
    read_until(process, "ready after ")
    [worker] = json.loads(run("stats", "--json", **where).stdout)["workers"]
    process.kill()
    process.wait()
    until(lambda: not is_alive(worker["pid"]))
    if has_own_server:
        until(lambda: run("stats", url="").returncode == 1)
    else:
        assert run("stats").returncode == 0


def test_up_starts_a_dead_worker_again(run: Run, start: Start) -> None:
    """A worker that is killed is replaced, and the screen says so."""
    process = start("up", "--model", "model-free", url="")
    read_until(process, "ready after ")
    [worker] = json.loads(run("stats", "--json", url="").stdout)["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    assert "ended with exit code 137" in read_until(process, "ready after ")
    assert run("submit", "Hi", "--max-tokens", "3", url="").returncode == 0
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 0


def test_up_gives_up_on_workers_that_cannot_start(start: Start) -> None:
    """What is wrong is said once, with what the worker said, instead of trying for ever."""
    process = start("up", "--model", "/no/such/model", url="")
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.startswith("promptq: worker 1 ended with exit code 1; it said:\n")
    assert "/no/such/model" in errors
    assert "Traceback" not in errors


def test_up_on_a_port_that_is_taken(run: Run, redis_url: str) -> None:
    """A port asked for is not silently another one."""
    port = str(urlsplit(redis_url).port)
    done = run("up", "--redis-port", port, url="")
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr


def test_a_port_that_there_is_not(run: Run) -> None:
    done = run("server", "--port", "70000", url="")
    assert done.returncode == 2
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_up_keeps_data(run: Run, start: Start, tmp_path: Path) -> None:
    """What waited in a server with a folder is there after a restart."""
    data = tmp_path / "data"
    for is_second in (False, True):
        process = start("up", "--data", str(data), "--workers", "0", url="")
        read_until(process, "stops all of it.\n")
        if is_second:
            assert json.loads(run("stats", "--json", url="").stdout)["waiting"] == 1
        else:
            run("submit", "--detach", "Hi", url="")
        process.send_signal(signal.SIGINT)
        process.communicate()


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
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = start_process(
        *PROMPTQ, *DEMO, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    screen = b""
    while chunk := _read_terminal(ours):
        screen += chunk
    os.close(ours)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode())
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= columns
    assert "12 done" in text
    assert "cancelled" in text


def _read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how a terminal says that nobody is at the other end
        return b""


def url_of_worker(parent: int) -> str:
    """What the demo tells its worker and nobody else."""
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
    process = start(*DEMO, url="")
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


def test_submit_to_a_real_worker(run: Run, start: Start) -> None:
    """The same seed gives the same text, through all of the house."""
    process = start("worker", "--model", "model-free")
    read_until(process, "ready after ")
    texts = [run("submit", "Hi", "--max-tokens", "30", "--seed", "5").stdout for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 31
    process.terminate()
    process.wait()


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


def test_server_alone(run: Run, start: Start) -> None:
    """A server for workers and producers of other terminals, until it is told to stop."""
    port = str(free_port())
    process = start("server", "--port", port, url="")
    assert f":{port}/" in read_until(process, "\n")
    assert run("stats", url="").returncode == 0
    process.terminate()
    assert process.communicate()[1] == ""
    assert process.returncode == 0
    assert run("stats", url="").returncode == 1
