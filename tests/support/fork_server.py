"""Starts `python -m MODULE` by forking a process that has already imported the libraries.

An interpreter needs half a second of CPU time to import the libraries of a command, and three
seconds for the libraries of a worker. The tests start hundreds of commands and workers. A test that
is about the start of a process, its command line or its environment uses `subprocess` instead. The
interpreter of an earlier release runs this file too, so this file imports nothing of promptq.

The processes of xdist are forks too, and share the fork servers of the process that started them.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
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
from pathlib import Path
from typing import Any, NoReturn

COMMAND = ("promptq.producer.commands.*", "promptq.producer.gateway.*", "promptq.producer.jobs.*")
WORKER = (
    "promptq.worker.command",
    "promptq.worker.serve.process",
    "promptq.worker.engine.runner.load_runner",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.tokenization_auto",
    "tests.faults.worker.faulty_worker",
    "tests.programs.chaos.processes.chaotic_worker",
    "tests.programs.stand_in_server.*",
)
TESTS = (
    *COMMAND,
    *WORKER,
    "aiohttp.test_utils",
    "anthropic",
    "cloudcoil.models.keda.v1alpha1",
    "fakeredis",
    "openai.types.responses",
    "playwright.async_api",
    "sympy",
    "torch._dynamo",
    "triton.runtime.interpreter",
    "tests.support.collected",
)
"""Libraries of all tests that take long to import, and the modules of all tests."""

_SHARED = "TESTS_FORK_SERVERS"
"""The environment variable with the folder of the fork servers that a run's processes share."""

_MAX_MESSAGE_BYTES = 1 << 18
_STREAMS = (0, 1, 2)

FORKED = (
    "promptq.producer.cli",
    "promptq.worker",
    "tests.faults.worker.faulty_worker",
    "tests.programs.stand_in_server",
)
"""Modules that tests start as forked processes."""


class ForkedProcess(subprocess.Popen[Any]):
    """A Popen whose process is forked. The command must be `[PYTHON, "-m", MODULE, ...]` or
    `[PYTHON, "-c", CODE]`. PYTHON must be the interpreter of `server`, by default a fork server of
    this checkout."""

    def __init__(
        self, command: Sequence[str], *, server: ForkServer | None = None, **options: Any
    ) -> None:
        self._server = server or fork_server(
            COMMAND if command[2] == "promptq.producer.cli" else WORKER
        )
        super().__init__(command, **options)

    @property
    def status(self) -> int:
        """The file descriptor that becomes readable when the process has ended. Valid until
        `wait`."""
        return self._status

    def _execute_child(self, *arguments: Any) -> None:
        """Popen calls this with its options and the ends of its pipes."""
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
    """A handle of a fork server: a process that forks. If a fork server listens at `path`, the
    handle connects to it. Otherwise the handle starts one, which ends with this process.

    Forks have one compute thread, because tiny models gain nothing from a second. Forks cannot
    choose another number with OMP_NUM_THREADS, because torch reads this variable when it is
    imported.
    """

    def __init__(
        self,
        libraries: Sequence[str],
        python: str,
        environment: dict[str, str],
        path: Path | None = None,
    ) -> None:
        self.python = python
        self._lock = threading.Lock()
        if path is not None and path.exists():
            self._socket = _new_socket()
            self._socket.connect(str(path))
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, _new_socket() as listening:
            sockets = [theirs.fileno()]
            if path is not None:
                listening.bind(str(path))
                listening.listen()
                sockets.append(listening.fileno())
            # An earlier release has no such module, so it runs this file. With -P, modules in this
            # folder do not hide libraries of the same names.
            program = ["-P", __file__] if "PYTHONPATH" in environment else ["-m", __name__]
            command = [python, *program, ",".join(map(str, sockets)), *libraries]
            kept = {
                name: value for name, value in os.environ.items() if not name.startswith("PROMPTQ_")
            }
            kept |= {"OMP_NUM_THREADS": "1", **environment}
            process = subprocess.Popen(command, pass_fds=sockets, env=kept)
            atexit.register(lambda: (process.kill(), process.wait()))

    def start(self, task: dict[str, Any], descriptors: list[int]) -> int:
        """Start a fork that does `task`. Returns the fork's process id. The first call waits until
        the libraries are imported. Raises RuntimeError if the fork server has ended."""
        with self._lock:  # a reply belongs to the task before it
            socket.send_fds(self._socket, [json.dumps(task).encode()], descriptors)
            if not (reply := self._socket.recv(16)):
                raise RuntimeError("the fork server has ended; its error is above")
            return int(reply)


_owned: list[ForkServer] = []
"""The fork servers that this process started for others."""


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@cache
def fork_server(
    libraries: tuple[str, ...], python: str = sys.executable, **environment: str
) -> ForkServer:
    """Returns the fork server with these libraries, interpreter and further environment variables.
    Calls with equal arguments return the same server."""
    path = None if environment else _shared_path(libraries)
    is_shared = path is not None and path.exists()
    return ForkServer(libraries, python, environment, path if is_shared else None)


def share_fork_servers(folder: Path) -> None:
    """Start fork servers for the processes that this process starts. A fork server imports its
    libraries before its first fork."""
    os.environ[_SHARED] = str(folder)
    shared = (COMMAND, WORKER)
    _owned.extend(ForkServer(it, sys.executable, {}, _shared_path(it)) for it in shared)


def _shared_path(libraries: Sequence[str]) -> Path | None:
    folder = os.environ.get(_SHARED)
    return (
        Path(folder, hashlib.sha256(repr(libraries).encode()).hexdigest()[:16]) if folder else None
    )


@dataclass(slots=True)
class _Forking:
    owner: socket.socket
    listening: Sequence[socket.socket]
    libraries: Sequence[str]
    clients: list[socket.socket] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    """For each child, the descriptor that gets its exit status."""

    def serve(self) -> tuple[str, list[str]] | None:
        """Fork until the owner ends. In a child, returns the child's program."""
        wake, woken = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # These are meant for the owner. An ignored one would be heard once the tests are imported.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        while True:
            sockets = [self.owner, *self.listening, *self.clients]
            ready, _, _ = select.select([wake, *sockets], [], [])
            if wake in ready:
                os.read(wake, 4096)
                self._report_ended()
            self.clients += [it.accept()[0] for it in self.listening if it in ready]
            for client in {self.owner, *self.clients}.intersection(ready):
                message, descriptors, _, _ = socket.recv_fds(client, _MAX_MESSAGE_BYTES, 4)
                if not message and client is self.owner:
                    return None
                if not message:
                    self.clients.remove(client)
                    client.close()
                    continue
                self._import_libraries()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for inherited in (wake, woken, descriptors[3], *self.statuses.values()):
                        os.close(inherited)
                    for each in (self.owner, *self.listening, *self.clients):
                        each.close()
                    return _become(json.loads(message), descriptors[:3])
                self.statuses[pid] = descriptors[3]
                for inherited in descriptors[:3]:
                    os.close(inherited)
                with suppress(BrokenPipeError):  # the client has just ended
                    client.send(str(pid).encode())

    def _import_libraries(self) -> None:
        if self.libraries:
            for name in self.libraries:
                with suppress(ImportError):  # a fork that needs the library reports the error
                    _import(name)
            self.libraries = ()
            gc.collect()
            gc.freeze()

    def _report_ended(self) -> None:
        while self.statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            descriptor = self.statuses.pop(pid)
            with suppress(BrokenPipeError):  # nobody waits for the status
                os.write(descriptor, status.to_bytes(4, "little"))
            os.close(descriptor)


def _become(task: dict[str, Any], streams: Sequence[int]) -> tuple[str, list[str]]:
    """Give this fork the state of a new process. Returns the option (`-m`, `-c`) and arguments."""
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
    numbers, *libraries = sys.argv[1:]
    owner, *listening = (socket.socket(fileno=int(number)) for number in numbers.split(","))
    program = _Forking(owner, listening, libraries).serve()
    if program is None:
        return
    option, (name, *arguments) = program
    try:
        if option == "-c":
            sys.argv = ["-c", *arguments]
            exec(name, {"__name__": "__main__"})  # noqa: S102
        else:
            sys.argv = [name, *arguments]
            for again in (name, f"{name}.__main__"):  # it runs anew, but its imports stay loaded
                sys.modules.pop(again, None)
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        _end(ended.code)
    _end(0)


def _end(code: str | int | None) -> NoReturn:
    """End like the interpreter, but without freeing all objects, which takes 0.3 s of CPU time."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except OSError:  # nobody reads the output; the interpreter reports this
        sys.exit(code)
    os._exit(code or 0)


if __name__ == "__main__":
    main()
