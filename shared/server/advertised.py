"""Stores the addresses of this user's embedded servers in files, so that commands find the servers.

Each server has a file in a folder of the user: the system's folder for running programs
(`XDG_RUNTIME_DIR`) or, if there is none, a folder in HOME. The file has the address with the
password, so only the user may read it. Files and folders that another user owns or may write to are
ignored: with them, another user could direct requests to another server.

A server keeps its file locked through a descriptor that it inherited. The kernel releases the lock
however the server ends. So if the lock is free, the server has ended, and another program may
listen at the address now.

A copied address may outlive its server and the file. So the password of an advertised server begins
with a mark of the folder. A program that sees the folder recognises the mark, finds no file, and
sends nothing to the address. A program in another HOME or container does not see the folder. Such a
program cannot know whether the server lives, and uses the address.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

_BEGUN = "new-"
_MARK = "promptq-embedded-"
_PRIVATE = 0o700
_OTHERS = 0o077


def is_free(port: int) -> bool:
    """Returns whether no process listens on this loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Advertisement:
    """The file that advertises a server which is about to start.

    The server inherits `descriptor`, which holds the lock on the file. Remove `file` before you
    stop the server: the server closes its port a moment before it ends.
    """

    def __init__(self, descriptor: int, begun: Path, file: Path) -> None:
        self.descriptor = descriptor
        self.file = file
        self._begun = begun

    @classmethod
    def prepare(cls, port: int, url: str) -> Self | None:
        """Writes `url` to a file that commands ignore until `publish`. Returns None on failure."""
        folder = _folder()
        with suppress(OSError):
            if _made_private(folder):
                descriptor, path = tempfile.mkstemp(prefix=_BEGUN, dir=folder)  # for its owner only
                # A name is never used again, so the file of a dead server can be deleted unread.
                name = f"{_prefix()}{port}-{Path(path).name.removeprefix(_BEGUN)}"
                begun = cls(descriptor, Path(path), folder / name)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.write(descriptor, url.encode())
                except OSError:
                    begun.close()
                else:
                    return begun
        return None

    def publish(self) -> None:
        """Makes the complete file visible to commands in one step. Closes the descriptor, so call
        this after the server has inherited it."""
        with suppress(OSError):
            self._begun.rename(self.file)
        self.close()

    def close(self) -> None:
        """Closes the descriptor and deletes an unfinished file. Further calls do nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self._begun.unlink(missing_ok=True)


def advertised(port: int | None = None) -> str | None:
    """Returns the address of this user's latest live embedded server; None if no server lives. With
    `port`, only a server that listens on this port counts."""
    return next((url for url in all_advertised() if port in (None, urlsplit(url).port)), None)


def all_advertised() -> Iterator[str]:
    """Yields the addresses of this user's live embedded servers, the latest first."""
    files = sorted(_files(_folder()), key=_written_at, reverse=True)
    return (url for file in files if (url := _living(file)) is not None)


def how_to_find(url: str) -> str:
    """Returns a sentence on how other programs of this user find a live server's address."""
    if advertised(urlsplit(url).port) == url:
        return "`promptq url` prints the password"
    return f"no other command finds it: {_folder()} cannot be used, or other users may use it"


def password_mark() -> str:
    """Returns the common beginning of the passwords of all servers that this user's folder
    advertises. Empty if the folder cannot be used."""
    folder = _folder()
    with suppress(OSError):
        if _made_private(folder):
            return _mark_of(folder)
    return ""


def _mark_of(folder: Path) -> str:
    """Returns a folder's mark: a hash of device, inode, user and machine. A path is not unique."""
    status = folder.stat()
    which = f"{status.st_dev} {status.st_ino} {os.getuid()} {os.uname().nodename}".encode()
    return f"{_MARK}{hashlib.sha256(which).hexdigest()[:8]}-"


def liveness_of(url: str) -> Callable[[], bool] | None:
    """Returns a function that tests whether the server of an advertised address lives. Returns None
    for an address that was not advertised, or whose folder this process cannot see.

    The server is identified by its password, so the rest of the address may be spelt in any way.
    Call the function between opening and using a connection. If the function returns True, the
    server lived when the connection was made, so the connection leads to this server.
    """
    match = re.search(rf"({_MARK}[0-9a-f]+-)[\w-]+", url)
    if match is None or match[1] not in {_mark_of(path) for path in _folders() if _is_ours(path)}:
        return None
    password = match[0]

    def is_living() -> bool:
        known = (_read(file) for folder in _folders() for file in _files(folder))
        return any(
            record is not None and record[1] and f":{password}@" in record[0] for record in known
        )

    return is_living


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_ours(Path(runtime)) and os.access(runtime, os.W_OK):
        return Path(runtime) / "promptq"  # after `su`, another user may own the folder
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:  # a user without a home, as in some containers, has no servers either
        state = os.devnull
    return Path(state) / "promptq"


def _folders() -> set[Path]:
    """Returns all folders that may have servers' files. There are several, because `cron`
    does not set XDG_RUNTIME_DIR."""
    folders = {_folder(), Path(f"/run/user/{os.getuid()}/promptq")}
    with suppress(RuntimeError):
        folders.add(Path.home() / ".local" / "state" / "promptq")
    return folders


def _prefix() -> str:
    """Returns the prefix of this machine's files, because several machines may share a home."""
    return f"server-{os.uname().nodename}-"


def _files(folder: Path) -> Iterator[Path]:
    prefix = _prefix()
    if _is_ours(folder):
        with suppress(OSError):
            yield from (file for file in folder.iterdir() if file.name.startswith(prefix))


def _made_private(folder: Path) -> bool:
    """Creates the folder, closed to other users. Returns False if other users may write to it."""
    folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    if not _is_ours(folder):
        return False
    folder.chmod(_PRIVATE)
    return True


def _is_ours(folder: Path) -> bool:
    try:
        at, named = folder.stat(), folder.lstat()  # a link's owner counts too
    except OSError:
        return False
    is_shut = not at.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(at.st_mode) and is_shut and {at.st_uid, named.st_uid} == {os.getuid()}


def _written_at(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0  # its server has just ended


def _living(file: Path) -> str | None:
    record = _read(file)
    if record is None:
        return None
    url, is_living = record
    if not is_living:
        file.unlink(missing_ok=True)  # its server was killed
        return None
    return url


def _read(file: Path) -> tuple[str, bool] | None:
    """Returns the address, and whether the server lives; None if the file is not private."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, errors="replace") as opened:
        status = os.fstat(descriptor)
        is_private = status.st_uid == os.getuid() and not status.st_mode & _OTHERS
        if not stat.S_ISREG(status.st_mode) or not is_private:
            return None
        return opened.read(), _is_locked(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases the lock
    except BlockingIOError:
        return True
    return False
