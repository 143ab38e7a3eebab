"""An inference server that the worker starts and ends."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from promptq.shared.errors import ConfigurationError
from promptq.worker.upstream import process_guard, vllm_plugin

_HOST = "127.0.0.1"
"""The address on which a server for one worker listens."""


class ServerProcess:
    """Runs a server's command behind a guard, which ends the server when this process ends."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        """Starts the command of a server on `port`. Raises ConfigurationError for a missing
        command."""
        self.url = f"http://{_HOST}:{port}"
        program = shutil.which(command[0])
        if program is None:
            raise ConfigurationError(
                f"--engine-command: there is no program {command[0]!r}; install the server, or give"
                " the path of its program"
            )
        self._name = command[0]
        self._guard = subprocess.Popen(  # noqa: S603 # the operator's own command
            [sys.executable, str(Path(process_guard.__file__)), program, *command[1:]],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            env=server_environment(),
            start_new_session=True,  # a Ctrl-C is for the worker, which drains first
        )

    def check(self) -> None:
        """Raise ConfigurationError if the server has ended before its first answer."""
        code = self._guard.poll()
        if code is not None:
            raise ConfigurationError(
                f"--engine-command: {self._name} ended with exit code {code}; its output is above"
            )

    def has_answered(self) -> None:
        """Report the first answer to the guard, which from then on restarts a server that ends.

        Raises ConfigurationError if the server has ended.
        """
        assert self._guard.stdin is not None
        try:
            os.write(self._guard.stdin.fileno(), b"answered\n")
        except BrokenPipeError:  # the server has ended just now, and the guard with it
            self._guard.wait()
            self.check()

    def close(self) -> None:
        """End the server, and wait for its end."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()


def server_environment() -> dict[str, str]:
    """Returns this process's environment variables, with additions by which vLLM finds promptq's
    plugin and llguidance."""
    folders = [str(Path(vllm_plugin.__file__).parent), os.environ.get("PYTHONPATH", "")]
    library = find_spec("llguidance")
    folder = Path(library.origin).parents[1] if library and library.origin else ""
    path = os.pathsep.join(filter(None, folders))
    return {**os.environ, "PYTHONPATH": path, "PROMPTQ_LLGUIDANCE": str(folder)}


def free_port() -> int:
    """Returns a port of this machine on which nothing listens at the moment."""
    with socket.create_server((_HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
