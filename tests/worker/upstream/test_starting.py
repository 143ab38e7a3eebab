"""A worker that forwards, as a command: what it finds, what it refuses, and a server of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from promptq import Client
from promptq.shared.errors import ConfigurationError
from promptq.shared.runtime import extras
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.build import build
from tests.programs.stand_in_server.starting import (
    StandIn,
    save_byte_gguf,
    save_byte_model,
    stand_in_server,
    text_after,
)
from tests.support.processes import StartedWorker
from tests.support.roles import as_role
from tests.support.servers import free_port
from tests.support.waiting import until
from tests.worker.test_refused_starts import one_sentence, run

GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_byte_model(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandIn]:
    with stand_in_server("vllm") as server:
        yield server


def refusal(redis_url: str, *options: str, **environment: str) -> str:
    return one_sentence(run("--redis", as_role("worker", redis_url), *options, **environment))


def test_serves_through_a_running_server_and_says_what_it_found(
    redis_url: str, tmp_path: Path, model: str, stand_in: StandIn
) -> None:
    options = ("--engine", "vllm", "--upstream", stand_in.url, "--model", model)
    worker = StartedWorker(tmp_path, redis_url, *options, "--dtype", "float32", is_new=True)
    with worker.process, Client(as_role("operator", redis_url)) as client:
        assert client.generate("Hi", max_tokens=20, **GREEDY).text == text_after("Hi", 20)
        shown = client.stats().workers[0]
        assert (shown.device, shown.kv_tokens) == (stand_in.url, 16 * 1024)
        maps = Path(f"/proc/{worker.process.pid}/maps").read_text()
        assert "libtorch" not in maps, "it would take half of the start and most of the memory"
        worker.process.terminate()
        assert worker.process.wait() == 0


def test_the_tokenizers_end_token_is_one_beside_the_configurations(
    tmp_path: Path, stand_in: StandIn
) -> None:
    folder = save_byte_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 10}))
    settings = WorkerSettings(engine="vllm", model=str(folder), upstream=stand_in.url)
    assert build(settings).end_token_ids == {10, 256}


@pytest.mark.parametrize(
    ("name", "other"), [("llama.cpp", "vllm"), ("sglang", "vllm"), ("openai", "llama.cpp")]
)
def test_says_that_another_server_is_there(
    redis_url: str, model: str, name: str, other: str
) -> None:
    with stand_in_server(other) as server:
        said = refusal(redis_url, "--engine", name, "--upstream", server.url, "--model", model)
    assert said.startswith(f"promptq worker: --upstream: {server.url} does not answer as ")


def test_says_that_nothing_answers(redis_url: str, model: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    said = refusal(redis_url, "--engine", "vllm", "--upstream", url, "--model", model)
    assert said.startswith(f"promptq worker: --upstream: no server to use: {url}: ")


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://127.0.0.1", "http://", "http://a/?b=1", "http://[::1", "http://a:x"],
)
def test_says_that_a_url_is_none(redis_url: str, model: str, url: str) -> None:
    said = refusal(redis_url, "--engine", "vllm", "--upstream", url, "--model", model)
    assert said == (
        f"promptq worker: --upstream: {url!r} is not the URL of a server; write http://host:8000"
    )


def test_a_url_with_a_password_is_refused_and_not_shown(redis_url: str, model: str) -> None:
    url = "http://me:s3cret@127.0.0.1:1"
    said = refusal(redis_url, "--engine", "vllm", "--upstream", url, "--model", model)
    assert said.startswith("promptq worker: --upstream: holds a password")
    assert "s3cret" not in said


def test_says_that_arguments_in_the_environment_are_no_list(redis_url: str) -> None:
    said = refusal(redis_url, PROMPTQ_ENGINE_ARGUMENTS="--tensor-parallel-size 2")
    assert "engine_arguments" in said
    assert said.endswith("write a JSON list")


def test_says_which_flag_vllm_needs(redis_url: str, model: str) -> None:
    with stand_in_server("vllm", "--without-ids") as server:
        said = refusal(redis_url, "--engine", "vllm", "--upstream", server.url, "--model", model)
    assert "start it with --enable-scale-out" in said


def test_says_that_llama_cpp_gives_no_ids(redis_url: str, model: str) -> None:
    options = ("--engine", "llama.cpp", "--model", model)
    with stand_in_server("llama.cpp", "--without-ids") as server:
        said = refusal(redis_url, *options, "--upstream", server.url)
    assert "gives no token ids" in said


def test_says_that_the_tokenizer_is_another_one(redis_url: str, stand_in: StandIn) -> None:
    shipped = str(Path(__file__).parents[3] / "worker" / "shipped" / "model")
    said = refusal(redis_url, "--engine", "vllm", "--upstream", stand_in.url, "--model", shipped)
    assert said.startswith("promptq worker: --model: its tokenizer is not that of the model 'm'")


def test_a_key_is_sent_and_a_wrong_one_is_named(redis_url: str, tmp_path: Path, model: str) -> None:
    with stand_in_server("vllm", "--key", "s3cret") as server:
        options = ("--engine", "vllm", "--upstream", server.url, "--model", model)
        said = refusal(redis_url, *options, PROMPTQ_UPSTREAM_KEY="wr0ng")
        assert said.startswith("promptq worker: --upstream-key: the server refuses the key")
        assert "wr0ng" not in said
        worker = StartedWorker(tmp_path, redis_url, *options, PROMPTQ_UPSTREAM_KEY="s3cret")
        worker.process.terminate()
        assert worker.process.wait() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--upstream", "http://127.0.0.1:1"), "--upstream: belongs to an inference server"),
        (("--engine", "vllm"), "--engine vllm: give --model"),
        (("--engine", "openai", "--model", "m"), "--engine openai: give --upstream"),
        (("--engine", "llama.cpp", "--model", "m"), "--engine llama.cpp: give a GGUF file as"),
        (
            ("--engine", "vllm", "--model", "m", "--engine-command", "/no/such"),
            "--engine-command: there is no program '/no/such'",
        ),
        (
            ("--engine", "vllm", "--model", "m", "--engine-command", "false"),
            "--engine-command: false ended with exit code 1;",
        ),
        (("--", "--swap-space", "0"), "-- ARGUMENTS: belongs to an inference server"),
        (
            ("--engine", "vllm", "--upstream", "http://127.0.0.1:1", "--", "--swap-space", "0"),
            "-- ARGUMENTS: belongs to a server that the worker starts",
        ),
    ],
)
def test_says_what_options_lack(redis_url: str, options: tuple[str, ...], said: str) -> None:
    assert refusal(redis_url, *options).startswith(f"promptq worker: {said}")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Returns a program that is called like `vllm serve MODEL --port N ...`, starts the stand-in
    and notes its pid.
    """
    return program_of("vllm", tmp_path)


def program_of(dialect: str, tmp_path: Path) -> Path:
    file = tmp_path / dialect
    file.write_text(
        f"""#!{sys.executable}
import json, os, sys
arguments = sys.argv[1:]
note = {str(tmp_path)!r} + "/started"
open(note, "a").write(json.dumps([os.getpid(), arguments]) + "\\n")
port = arguments[arguments.index("--port") + 1]
stand_in = [sys.executable, "-m", "tests.programs.stand_in_server", {dialect!r}, "--port", port]
os.execv(sys.executable, stand_in)
"""
    )
    file.chmod(0o755)
    return file


def started(program: Path) -> list[tuple[int, list[str]]]:
    """The process and the arguments of each server that was started."""
    return [tuple(json.loads(line)) for line in (program.parent / "started").open()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_restarts_its_own_server_when_that_dies_and_ends_it(
    redis_url: str, tmp_path: Path, model: str, program: Path
) -> None:
    options = ("--engine", "vllm", "--engine-command", str(program), "--model", model)
    worker = StartedWorker(
        tmp_path, redis_url, *options, "--dtype", "float32", "--", "--swap-space", "0"
    )
    with worker.process, Client(as_role("operator", redis_url)) as client:
        [(first, arguments)] = started(program)
        assert arguments[:2] == ["serve", model]
        assert arguments[-2:] == ["--swap-space", "0"]
        request_id = client.enqueue("Hi", max_tokens=200, **GREEDY)
        events = client.stream(request_id)
        texts = [next(events).text]
        os.kill(first, signal.SIGKILL)
        texts += [event.text for event in events]
        assert "".join(texts) == text_after("Hi", 200)
        (second, again) = started(program)[-1]
        assert (second != first, again) == (True, arguments)
        worker.process.terminate()
        assert worker.process.wait() == 0
        until(lambda: not is_alive(second))


def test_says_which_packages_read_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a server is started, which would read it."""
    file = save_byte_gguf(tmp_path / "bytes.gguf")
    monkeypatch.setattr(extras, "_is_complete", lambda extra: extra == "upstream")
    said = r"packages .*\[gguf,worker\].*; or name the directory of the model's tokenizer"
    with pytest.raises(ConfigurationError, match=said):
        build(WorkerSettings(engine="llama.cpp", model=str(file), engine_command="/no/such"))


def test_a_gguf_file_has_all_that_llama_cpp_and_its_worker_need(
    redis_url: str, tmp_path: Path
) -> None:
    file, program = save_byte_gguf(tmp_path / "bytes.gguf"), program_of("llama.cpp", tmp_path)
    options = ("--engine", "llama.cpp", "--engine-command", str(program), "--model", str(file))
    worker = StartedWorker(tmp_path, redis_url, *options)
    with worker.process, Client(as_role("operator", redis_url)) as client:
        [(_, arguments)] = started(program)
        assert arguments[-2:] == ["--model", str(file)]
        assert client.generate("Hi", max_tokens=20, **GREEDY).text == text_after("Hi", 20)
        worker.process.terminate()
        assert worker.process.wait() == 0


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_ends_with_its_worker_even_if_that_is_killed(
    redis_url: str, tmp_path: Path, model: str, name: str
) -> None:
    program = program_of(name, tmp_path)
    options = ("--engine", name, "--engine-command", str(program), "--model", model)
    worker = StartedWorker(tmp_path, redis_url, *options)
    with worker.process:
        [(pid, _)] = started(program)
        assert is_alive(pid)
        worker.process.kill()
    until(lambda: not is_alive(pid))
