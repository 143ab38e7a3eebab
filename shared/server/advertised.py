"""Where the embedded servers of this user are, so that commands find them without an address.

Each is a file in a folder of the user's own: the one for running programs if the system gives one
(`XDG_RUNTIME_DIR`), else one in HOME. A folder that another user owns, or may write to, is not
believed, for requests would go to whatever server that user named.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit


def is_free(port: int) -> bool:
    """Whether nobody listens on this loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def advertise(url: str) -> None:
    """Let later commands of this user find the server without being told its address."""
    folder = _folder()
    with suppress(OSError):  # nowhere to write: commands then need the address
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder):
            whole = folder / f"new-{os.getpid()}"
            whole.write_text(url)
            whole.rename(_file(folder, url))  # a reader finds all of it or nothing


def withdraw(url: str) -> None:
    """Undo `advertise`: commands find the server before it again, if that still runs."""
    if _is_ours(_folder()):
        _file(_folder(), url).unlink(missing_ok=True)


def advertised() -> str | None:
    """The address of this user's embedded server, of several the latest; None if none lives."""
    if not _is_ours(_folder()):
        return None
    files = sorted(_folder().glob("server-*"), key=_written_at, reverse=True)
    return next((url for file in files if (url := _living(file)) is not None), None)


def _folder() -> Path:
    """The folder with a file for each server of this user, by its port."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_ours(Path(runtime)) and os.access(runtime, os.W_OK):
        return Path(runtime) / "promptq"  # `su` may leave that of another user
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:  # a user without a home, as in some containers, has no servers either
        state = os.devnull
    return Path(state) / "promptq"


def _file(folder: Path, url: str) -> Path:
    return folder / f"server-{urlsplit(url).port}"


def _is_ours(folder: Path) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _written_at(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0  # its server has just ended


def _living(file: Path) -> str | None:
    try:
        url = file.read_text()
    except OSError:
        return None
    try:
        port = urlsplit(url).port
    except ValueError:
        port = None
    if port is None or is_free(port):
        file.unlink(missing_ok=True)  # its server was killed
        return None
    return url
