"""Processes that tests start."""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.fork_server import FORKED, ForkedProcess
from tests.support.roles import as_role


def hear_signals() -> None:
    """Handle signals that this process inherited as ignored.

    A shell makes background processes ignore interrupts. Children inherit this setting, so a test
    could not interrupt them. Call this function in the main thread.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def start(*command: str | Path, is_new: bool = False, **options: Any) -> subprocess.Popen[Any]:
    """Start a process that handles signals; `options` are Popen's.

    If the import of the process's libraries takes long, a fork server starts the process. With
    `is_new`, the process is never a fork, so that /proc shows its own memory, command line and
    environment.
    """
    hear_signals()
    if is_new:
        return subprocess.Popen([*map(str, command)], **options)
    is_ours = [*map(str, command[:2])] == [sys.executable, "-m"]
    kind = ForkedProcess if is_ours and str(command[2]) in FORKED else subprocess.Popen
    return kind([*map(str, command)], **options)


def run(*command: str | Path, stdin: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Start a process and wait for its end. Returns the completed process, with output and errors
    as text."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = start(*command, text=True, **pipes, **options)
    output, errors = process.communicate(stdin)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@contextmanager
def running(*command: str | Path, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Starts a process like `start`. At the end of the context, kills it if it still runs."""
    with start(*command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


class StartedWorker:
    """A worker process in the role `worker`. The process runs `promptq.worker`, or a `module` with
    faults, and its log goes to a file."""

    def __init__(
        self,
        folder: Path,
        url: str,
        *options: str,
        module: str = "promptq.worker",
        is_new: bool = False,
        **environment: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._errors = folder / f"worker-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", module, "--redis", as_role("worker", url), *options]
        with self._errors.open("w") as errors:
            self.process = start(
                *command,
                is_new=is_new,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
            )
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.first_line = output.readline()
        assert self.first_line.startswith("ready after "), self.said

    @property
    def said(self) -> str:
        """The text of the log so far."""
        return self._errors.read_text()

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Returns the entries of the log whose event contains this text."""
        # The last line may be incomplete.
        whole, _, _ = self.said.rpartition("\n")
        lines = [line for line in whole.splitlines() if line.startswith("{")]
        return [entry for entry in map(json.loads, lines) if event in entry["event"]]

    def terminate(self) -> None:
        self.process.terminate()

    def wait(self) -> int:
        return self.process.wait()


@contextmanager
def started(
    folder: Path, url: str, *options: str, module: str = "promptq.worker", **environment: str
) -> Iterator[StartedWorker]:
    worker = StartedWorker(folder, url, *options, module=module, **environment)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


class Terminal:
    """A process with a separate terminal, to which its `streams` are connected. `shown` has the
    output that was read so far."""

    def __init__(
        self,
        *command: str | Path,
        streams: Sequence[str] = ("stdin", "stdout", "stderr"),
        columns: int = 0,
        lines: int = 0,
        **options: Any,
    ) -> None:
        self._fd, theirs = pty.openpty()
        if columns:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        options |= dict.fromkeys(streams, theirs)
        self.process = start(*command, start_new_session=True, **options)
        os.close(theirs)
        self.shown = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    @property
    def plain(self) -> str:
        """The output without colours and cursor movements."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.shown)

    def read(self) -> bool:
        """Wait for the next output and read it. Returns False if no process writes any longer."""
        try:
            piece = os.read(self._fd, 65536)
        except OSError:  # no process has the other end of the terminal open
            return False
        self.shown += self._decoder.decode(piece)
        return bool(piece)

    def read_until(self, pattern: str) -> None:
        while not re.search(pattern, self.shown):
            assert self.read(), self.shown

    def read_rest(self) -> None:
        while self.read():
            pass

    def press(self, key: bytes) -> None:
        os.write(self._fd, key)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Returns standard output up to and including `text`. Standard error must be a pipe, too."""
    assert process.stdout is not None
    read = ""
    while not read.endswith(text):
        letter = process.stdout.read(1)
        if not letter:
            raise AssertionError(f"it ended after {read!r}: {process.communicate()[1]}")
        read += letter
    return read


def read_line(process: subprocess.Popen[str]) -> str:
    """Returns the next line of standard output, which must be a pipe."""
    assert process.stdout is not None
    return process.stdout.readline()


async def until_ready(process: subprocess.Popen[str]) -> None:
    """Wait for a service's ready line on standard output. Standard error must be a pipe, too."""
    told = await asyncio.to_thread(read_line, process)
    assert process.stderr is not None
    assert told.startswith("ready"), told + process.stderr.read()


def family_of(pid: int) -> list[int]:
    """Returns the ids of a process and all its descendants, the oldest first."""
    family = [pid]
    while new := [child for child, parent in _parents().items() if _is_new(child, parent, family)]:
        family += new
    return family


def kill_all(pid: int) -> None:
    """SIGKILL a process and all its descendants."""
    for each in family_of(pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process lives. A zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _is_new(child: int, parent: int, family: list[int]) -> bool:
    return parent in family and child not in family


def _parents() -> dict[int, int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents
