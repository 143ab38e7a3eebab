"""Starts, watches and stops child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

_LAST_LINES = 15

# The shell ends the child when the pipe from the owner closes, however the owner died. Otherwise
# the shell exits with the child's status. Descriptor 3 is that pipe; the child does not inherit it.
_WATCH_OWNER = """
exec 3<&0 </dev/null
"$@" 3<&- & child=$!
{ read -r _ <&3; kill "$child"; } 2>/dev/null & watcher=$!
exec 3<&-
wait "$child"; status=$?
kill "$watcher" 2>/dev/null
exit "$status"
"""


def worker_command(args: Sequence[str]) -> list[str]:
    """Returns the command line of a worker process."""
    return _command("promptq.worker", args)


def promptq_command(args: Sequence[str]) -> list[str]:
    """Returns the command line of a process that runs a `promptq` command, such as `gateway`."""
    return _command("promptq.producer.cli", args)


def _command(module: str, args: Sequence[str]) -> list[str]:
    # -P: the current folder may hold anything, so nothing is imported from it.
    return [sys.executable, "-P", "-m", module, *args]


class ChildProcess:
    """A child process and its output. The child ends when its parent ends.

    The child is ready when a line of its output begins with `ready`. A thread calls `show` with
    each line of output.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], show: Callable[[str], None]
    ) -> None:
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.is_ready = False
        self._show = show
        self._shell = subprocess.Popen(  # noqa: S603 # a list of ours, no shell
            ["/bin/sh", "-c", _WATCH_OWNER, "sh", *command],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the owner, which then stops it
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process: None while it runs, 128 + n if signal n ended it."""
        return self._shell.poll()

    @property
    def output(self) -> str:
        """The last lines of the process's output. Read this only after the process has ended."""
        self._reader.join(timeout=2.0)
        return "\n".join(self.last_lines)

    def has(self, pid: int) -> bool:
        """Returns whether the process `pid` of this machine belongs to the child's session."""
        with suppress(OSError, OverflowError):  # no such process, or a wrong number
            return os.getsid(pid) == self._shell.pid
        return False

    def drain(self) -> None:
        """Makes the process finish its work and exit."""
        if self._shell.stdin is not None:
            self._shell.stdin.close()

    def kill(self) -> None:
        """Ends the process at once."""
        self.drain()
        with suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        self.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits up to `timeout` seconds. Returns whether the process has ended."""
        try:
            self._shell.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(timeout=2.0)
        if self._shell.stdout is not None and not self._reader.is_alive():
            self._shell.stdout.close()
        return True

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            text = line.rstrip("\n").rsplit("\r", 1)[-1]  # a progress bar's last state
            self.last_lines.append(text)
            self.is_ready = self.is_ready or text.startswith("ready")
            self._show(text)
