"""Errors that prevent a worker's start are one sentence; and the command's help."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from promptq.shared.errors import ModelNotFoundError
from promptq.shared.server.embedded import EmbeddedServer
from promptq.shared.settings.worker import read_worker_settings
from promptq.worker.serve.build import build
from tests.producer.playing import old_server
from tests.support import processes
from tests.support.servers import free_port

COMMAND = [sys.executable, "-m", "promptq.worker"]


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return processes.run(*COMMAND, *options, env={**os.environ, **environment})


def one_sentence(outcome: subprocess.CompletedProcess[str]) -> str:
    assert outcome.returncode == 1, outcome
    # Lines of the log tell of a slow machine's start; they are JSON.
    said = [line for line in outcome.stderr.splitlines() if not line.startswith("{")]
    assert len(said) == 1, outcome.stderr
    assert said[0].startswith("promptq worker: "), outcome.stderr
    return said[0]


def test_says_that_no_server_is_there() -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    said = one_sentence(run("--model", "model-free", "--redis", url))
    assert f"no Redis server answers at {url}" in said


def test_says_that_credentials_are_wrong_and_shows_no_password() -> None:
    with EmbeddedServer() as server:
        url = f"redis://:wr0ng@127.0.0.1:{server.port}/0"
        said = one_sentence(run("--model", "model-free", "--redis", url))
    assert "refused the credentials" in said
    assert "wr0ng" not in said


def test_says_that_a_server_is_too_old() -> None:
    with old_server("6.2.14") as url:
        said = one_sentence(run("--model", "model-free", "--redis", url))
    assert "is Redis 6.2.14; promptq needs Redis 7 or Valkey 8" in said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--redis", "http://localhost"], "is not a Redis URL"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory: 'lots' is not a size"),
        (["--kv-cache-memory", "900T"], "--kv-cache-memory: 921,600.0 GiB are requested, but "),
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
        build(read_worker_settings(model=str(tmp_path)))
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotFoundError, match="causal"):
        build(read_worker_settings(model=str(tmp_path)))


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_what_options_take(option: str) -> None:
    shown = " ".join(run(option).stdout.split())
    assert "--log-level debug|info|warning|error" in shown
    assert "--async-scheduling true|false" in shown
    assert "waits for the server to answer [default: 0.0]" in shown


def test_starts_without_torch() -> None:
    code = "import sys, promptq.worker.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
