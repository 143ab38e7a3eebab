"""Runs an inference server for a worker, and ends all processes of the server with the worker.

`python process_guard.py COMMAND ...` starts the command in a new process group. However the worker
dies, standard input ends, and then the guard ends the whole group. If only the server's main
process ended, its other processes could keep the device. The worker writes a line to standard input
when the server has answered. If the command ends before this line, the guard ends with the same
exit code. If the command ends later, the guard starts it again.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

_GRACE_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_MAX_PAUSE_SECONDS = 30.0
_LIVED_SECONDS = 60.0


def main(command: list[str]) -> int:
    """Run the command, which is an inference server, and start it again whenever it ends.

    A line on standard input says that the server has answered. If the command ends before this
    line, returns the command's exit code. If standard input ends, stops the command and returns 0.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the worker drains, and needs the server for that
    has_answered, pause = False, 1.0
    while True:
        started = time.monotonic()
        process = subprocess.Popen(  # noqa: S603 # the operator's own command
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_heed_signals
        )
        try:
            while process.poll() is None:
                line = _read_line(_LOOK_SECONDS)
                if line == "":
                    return 0
                has_answered = has_answered or line is not None
        finally:
            _end(process)
        if not has_answered:
            return process.returncode
        has_lived = time.monotonic() - started > _LIVED_SECONDS
        pause = 1.0 if has_lived else min(2 * pause, _MAX_PAUSE_SECONDS)
        if _read_line(pause) == "":
            return 0


def _heed_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _read_line(seconds: float) -> str | None:
    """Returns text from standard input; None without new text in `seconds`; '' at its end."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1024).decode() if readable else None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the whole process group: with SIGTERM, and after some time with SIGKILL."""
    _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
