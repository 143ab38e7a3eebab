"""OpenAI's client for Node, unmodified. It is installed once, in this user's cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.producer.gateway.living import LiveGateway
from tests.support.model_free import text_of

_PACKAGE = "openai@6"
_SCRIPT = Path(__file__).with_name("openai_client.mjs")


@pytest.fixture
def node_folder() -> Path:
    """Where the package is installed."""
    if missing := [name for name in ("node", "npm") if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed; the Python client is tested")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "promptq-tests" / "node"
    if not (folder / "node_modules" / "openai").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", _PACKAGE]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm cannot install {_PACKAGE}: {(done.stderr or done.stdout)[:200]}")
    return folder


def test_the_node_client(letters_gateway: LiveGateway, node_folder: Path) -> None:
    """Whole and streamed answers, several of them, log-probabilities, usage, error classes, files
    and batches."""
    script = shutil.copy(_SCRIPT, node_folder / f"client-{os.getpid()}.mjs")
    try:
        command = ["node", script, letters_gateway.base_url]
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        Path(script).unlink()
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    one, two = text_of(3, 5), text_of(4, 5)
    assert got["models"] == ["model-free"]
    assert got["texts"] == [one, two]
    assert got["tokens"] == list(one)
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]) == (4, 10)
    assert got["streamed"] == one
    assert got["streamedUsage"]["completion_tokens"] == 5
    assert got["text"] == "Once" + one
    unknown = {"status": 404, "code": "model_not_found", "param": "model"}
    wrong = {"status": 400, "code": "invalid_request", "param": "temperature"}
    assert got["errors"] == [
        {"kind": "BadRequestError", **wrong},
        {"kind": "NotFoundError", **unknown},
        {"kind": "NotFoundError", **unknown},
    ]
    assert got["left"]
    assert got["file"] == ["in.jsonl", True]
    assert got["batch"] == ["validating", "cancelling"]
    assert got["listed"] == [True]
    assert got["deleted"]
    assert got["missing"]["kind"] == "NotFoundError"
