"""Starts `python -m MODULE` by forking a process that has already imported the libraries.

An interpreter needs half a second of CPU time to import the libraries of a command, and three
seconds for those of a worker. The tests start hundreds of both. A test whose subject is the start
of a process, its command line or its first environment uses `subprocess` itself. The interpreter of
an earlier release runs this file too, so it imports nothing of ours.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

COMMAND = ("promptq.producer.commands.*", "promptq.producer.gateway.*", "promptq.producer.jobs.*")
WORKER = (
    "promptq.worker.command",
    "promptq.worker.serve.process",
    "promptq.worker.engine.runner.load_runner",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.tokenization_auto",
)
_MAX_MESSAGE_BYTES = 1 << 18
_STREAMS = (0, 1, 2)

FORKED = (
    "promptq.producer.cli",
    "promptq.worker",
    "tests.faults.worker.faulty_worker",
)
"""Modules that the tests' processes run."""


class ForkedProcess(subprocess.Popen[Any]):
    """A Popen of `[PYTHON, "-m", MODULE, ...]` or of `-c`, with the same methods. PYTHON and its
    libraries belong to `server`, by default a server of this checkout."""

    def __init__(
        self, command: Sequence[str], *, server: ForkServer | None = None, **options: Any
    ) -> None:
        self._server = server or fork_server(WORKER if "worker" in command[2] else COMMAND)
        super().__init__(command, **options)

    @property
    def status(self) -> int:
        """The descriptor that becomes readable when the process has ended. Valid until `wait`."""
        return self._status

    def _execute_child(self, *arguments: Any) -> None:
        """Called by Popen, with the arguments of its constructor in their order."""
        command, _, _, _, _, folder, environment, _, _, _, *pipes = arguments[:16]
        python, option, *program = command
        assert (python, option) in ((self._server.python, "-m"), (self._server.python, "-c"))
        self._status, status = os.pipe()
        child_ends = [
            own if end == -1 else end
            for own, end in zip(_STREAMS, (pipes[0], *pipes[3::2]), strict=True)
        ]
        task = {
            "option": option,
            "program": program,
            "environment": dict(os.environ if environment is None else environment),
            "folder": os.fspath(folder or os.getcwd()),
            "new_session": arguments[-2],
            "process_group": arguments[-1],
        }
        self.pid = self._server.start(task, [*child_ends, status])
        self._child_created = True
        os.close(status)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined] # Popen's own

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        timeout = 0 if wait_flags & os.WNOHANG else None
        if not select.select([self._status], [], [], timeout)[0]:
            return 0, 0
        status = os.read(self._status, 4)
        os.close(self._status)
        return self.pid, int.from_bytes(status, "little")

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


class ForkServer:
    """The owner's handle of the process that forks."""

    def __init__(self, libraries: Sequence[str], python: str, environment: dict[str, str]) -> None:
        self.python = python
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Another release has no such module. With -P, modules beside it do not hide libraries
            # of the same names.
            program = ["-P", __file__] if "PYTHONPATH" in environment else ["-m", __name__]
            command = [python, *program, str(theirs.fileno()), *libraries]
            kept = {
                name: value for name, value in os.environ.items() if not name.startswith("PROMPTQ_")
            }
            kept |= environment
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=kept)

    def start(self, task: dict[str, Any], descriptors: list[int]) -> int:
        """Returns the process id. The first call waits until the libraries are imported."""
        socket.send_fds(self._socket, [json.dumps(task).encode()], descriptors)
        return int(self._socket.recv(16))


@cache
def fork_server(
    libraries: tuple[str, ...], python: str = sys.executable, **environment: str
) -> ForkServer:
    """Returns the only server with these libraries; `environment` is added to this process'."""
    return ForkServer(libraries, python, environment)


@dataclass(slots=True)
class _Forking:
    socket: socket.socket
    statuses: dict[int, int] = field(default_factory=dict)
    """For each child, the descriptor that gets its exit status."""

    def serve(self) -> tuple[str, list[str]] | None:
        """Fork until the owner ends. In a child, returns the child's program."""
        wake, woken = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM):  # the owner's, not this process's
            signal.signal(number, signal.SIG_IGN)
        while True:
            ready, _, _ = select.select([self.socket, wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
                self._report_ended()
            if self.socket in ready:
                message, descriptors, _, _ = socket.recv_fds(self.socket, _MAX_MESSAGE_BYTES, 4)
                if not message:
                    return None
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for inherited in (wake, woken, descriptors[3], *self.statuses.values()):
                        os.close(inherited)
                    self.socket.close()
                    return _become(json.loads(message), descriptors[:3])
                self.statuses[pid] = descriptors[3]
                for inherited in descriptors[:3]:
                    os.close(inherited)
                self.socket.send(str(pid).encode())

    def _report_ended(self) -> None:
        while self.statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            descriptor = self.statuses.pop(pid)
            with suppress(BrokenPipeError):  # nobody waits for it
                os.write(descriptor, status.to_bytes(4, "little"))
            os.close(descriptor)


def _become(task: dict[str, Any], streams: Sequence[int]) -> tuple[str, list[str]]:
    """Give this process the state of a new one. Returns the option and its arguments."""
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for own, descriptor in zip(_STREAMS, streams, strict=True):
        os.dup2(descriptor, own)
        os.close(descriptor)
    if task["new_session"]:
        os.setsid()
    if task["process_group"] >= 0:
        os.setpgid(0, task["process_group"])
    os.chdir(task["folder"])
    os.environ.clear()
    os.environ.update(task["environment"])
    for own, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        setattr(sys, name, open(own, mode, buffering=1, closefd=False))  # noqa: SIM115
    return task["option"], task["program"]


def _import(name: str) -> None:
    """Import a module, or for `PACKAGE.*` the package and all of its modules."""
    package = importlib.import_module(name.removesuffix(".*"))
    if name.endswith(".*"):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)


def main() -> None:
    descriptor, *libraries = sys.argv[1:]
    for name in libraries:
        _import(name)
    gc.collect()
    gc.freeze()
    program = _Forking(socket.socket(fileno=int(descriptor))).serve()
    if program is None:
        return
    option, (name, *arguments) = program
    try:
        if option == "-c":
            sys.argv = ["-c", *arguments]
            exec(name, {"__name__": "__main__"})  # noqa: S102
        else:
            sys.argv = [name, *arguments]
            sys.modules.pop(name, None)  # what it imports stays, itself it begins anew
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        _end(ended.code)
    _end(0)


def _end(code: str | int | None) -> NoReturn:
    """End like the interpreter, but without freeing each object, which takes 0.3 s of CPU time."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except OSError:  # nobody reads it: the interpreter says so
        sys.exit(code)
    os._exit(code or 0)


if __name__ == "__main__":
    main()
