"""Installs the wheel in an empty folder and uses all of its parts.

`--newest` installs the newest versions of all packages but torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from promptq.shared.server.embedded import EmbeddedServer
from tests.programs.package import building
from tests.support.processes import start
from tests.support.servers import free_port

# A line that the demo's model does not write.
STRANGERS_CODE_RAN = "code of another package was run"
STRANGER = f"raise SystemExit({STRANGERS_CODE_RAN!r})\n"
PROGRAM = """
from promptq import AsyncClient, Client

with Client() as client:
    request_id = client.enqueue("Once upon a time", max_tokens=12)
    text = "".join(event.text for event in client.stream(request_id))
    assert text, "no text"
    assert client.result(request_id).text == text
print("streamed", len(text))
"""
ENQUEUE = """
import sys
from promptq import Client

with Client(sys.argv[1]) as client:
    print(client.state(client.enqueue("Once upon a time", max_tokens=3)))
"""
TYPED = """
from promptq import Client


def read(client: Client) -> str:
    return client.result(client.enqueue("x")).text


wrong: int = Client().enqueue("x")
"""


class Stranger:
    """A user of the wheel with an empty home. PYTHONPATH has other packages with the names of
    promptq's folders."""

    def __init__(self, python: Path, folder: Path, name: str, *, path: str = "") -> None:
        self.folder = folder / name
        for package in ("shared", "worker", "producer"):
            (self.folder / "packages" / package).mkdir(parents=True)
            (self.folder / "packages" / package / "__init__.py").write_text(STRANGER)
        (self.folder / "home").mkdir()
        (self.folder / "empty").mkdir()
        self.environment = {
            "HOME": str(self.folder / "home"),
            "PATH": f"{python.parent}:{path or os.environ['PATH']}",
            "PYTHONPATH": str(self.folder / "packages"),
            "COLUMNS": "200",
        }

    def start(self, *command: str, **options: int) -> subprocess.Popen[str]:
        return start(
            *command, cwd=self.folder / "empty", env=self.environment, text=True, **options
        )

    def run(self, *command: str) -> str:
        """Run a command, and return its output. Raises an error if the command fails."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with self.start(*command, **pipes) as process:
            said = process.communicate()[0]
        assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{said}"
        assert STRANGERS_CODE_RAN not in said, f"{command}:\n{said}"
        return said


def check_client(python: Path, folder: Path) -> None:
    """Checks that the package without extras enqueues, has types, and names missing extras."""
    stranger = Stranger(python, folder, "of-client")
    for command, extras in {
        "promptq": "cli",
        "python -m promptq.worker": "worker",
    }.items():
        said = stranger.run("sh", "-c", f"{command} 2>&1 | tail -n 1")
        assert f"whl)[{extras}]" in said, said
    with EmbeddedServer() as server:
        stranger.run("python", "-c", "import promptq; promptq.run_batch")
        said = stranger.run("python", "-c", ENQUEUE, server.url)
        assert said.strip() == "waiting", said
    print("a client without extras enqueues, and says what the rest needs")
    program = stranger.folder / "typed.py"
    program.write_text(TYPED)
    checker = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    cache = ["--cache-dir", str(stranger.folder / "mypy")]
    told = subprocess.run(
        [*checker, *cache, str(program)], capture_output=True, text=True, check=False, cwd=folder
    )
    assert re.search(r"typed\.py:9: error: .* has type \"str\".*\nFound 1 error", told.stdout), told
    print("mypy knows its types")


def check_everything(python: Path, folder: Path) -> None:
    """Checks all parts: the demo, server, worker, gateway and clients, also without a compiler."""
    stranger = Stranger(python, folder, "of-all")
    version = stranger.run("promptq", "--version").strip()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version), version
    with running(stranger) as address:
        said = stranger.run("promptq", "submit", "Once upon a time", "--max-tokens", "8")
        assert said.strip(), "no text"
        assert "streamed" in stranger.run("python", "-c", PROGRAM)
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8}).encode()
        with urllib.request.urlopen(f"{address}/v1/completions", body) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        with urllib.request.urlopen(f"{address}/") as page:
            assert b"<html" in page.read()
    print("promptq up serves a command, a program, HTTP and the dashboard")
    without = folder / "tools"
    without.mkdir()
    for tool in ("sh", "rm", "uname", "env"):
        (without / tool).symlink_to(shutil.which(tool) or tool)
    poor = Stranger(python, folder, "without-compiler", path=str(without))
    said = poor.run("promptq", "demo")
    assert "12 requests pushed in" in said, said
    assert "no native code" not in said, said
    print("the demo runs, and native code comes with the wheel")
    [made] = (python.parent.parent / "lib").rglob("promptq/worker/engine/native/built")
    shutil.rmtree(made)
    said = poor.run("promptq", "demo")
    assert "no native code" in said, said
    assert said.count("install g++") == 1, said
    print("without it and without a compiler PyTorch serves, and the worker says so")


@contextmanager
def running(stranger: Stranger, *options: str) -> Iterator[str]:
    """Run `promptq up` with HTTP and these options, and end it by Ctrl-C. Yields its address."""
    port = free_port()
    command = ["promptq", "up", "--port", str(port), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with stranger.start(*command, **pipes) as process:
        assert process.stdout is not None
        awaited, said = {"worker", "gateway", "jobs"}, []
        while awaited:
            line = process.stdout.readline()
            assert line, "".join(said)
            said.append(line)
            awaited -= {name for name in awaited if name in line and "ready" in line}
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.communicate()[0]
    assert process.returncode == 0, rest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests package", description=__doc__)
    parser.add_argument(
        "--newest",
        action="store_true",
        help="install the newest versions, not those of constraints.txt",
    )
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of building one")
    options = parser.parse_args()
    newest = options.newest
    with tempfile.TemporaryDirectory(prefix="promptq-package-") as name:
        folder = Path(name)
        wheel = options.wheel or building.build(folder / "dist")
        building.check_contents(wheel)
        check_client(building.install(folder / "client", wheel, newest=newest), folder)
        python = building.install(folder / "all", wheel, "all", newest=newest)
        check_everything(python, folder)
    print("the package works as it is installed")


if __name__ == "__main__":
    main()
