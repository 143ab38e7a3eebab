"""Starts and controls a process for one of several models, as the owner of that process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.swapping.standby import Known, Order, Report

Target = Callable[[WorkerSettings, str, Connection], None]


class ProcessState(Enum):
    """States of a model's process. In LOADING, SERVING and DRAINING, the model may be in memory."""

    STARTING = auto()
    STANDBY = auto()
    LOADING = auto()
    SERVING = auto()
    DRAINING = auto()
    ENDED = auto()


def forking(*libraries: str) -> ForkServerContext:
    """Returns a context for processes that start with `libraries` (names of modules) imported. An
    import takes seconds.

    The context forks from a separate process, because this process has threads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*libraries])
    return context


@contextmanager
def _not_importing_from_here() -> Iterator[None]:
    # The fork server starts here, but must not import modules from the current folder.
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


class ModelProcess:
    """A process that runs `target` with the settings, Redis' URL and a connection to the owner, the
    process that creates this object.

    If the owner ends, the connection closes. Then the process with the model drains and ends.
    """

    def __init__(
        self,
        context: ForkServerContext,
        target: Target,
        settings: WorkerSettings,
        redis_url: str,
        known: Known | None = None,
    ) -> None:
        """`known` is the test result of an earlier process that loaded this model."""
        self.has_room = True
        """False if the process reported that the model does not fit beside the loaded models."""
        self.failure = ""
        """The reason why the process ended; empty if the process has reported none."""
        self.served = ""
        """The ready line; empty until the process claims requests."""
        self.known = known
        self.state = ProcessState.STARTING
        self._line, its_end = context.Pipe()
        self._process = context.Process(target=target, args=(settings, redis_url, its_end))
        with _not_importing_from_here():
            self._process.start()
        its_end.close()

    @property
    def exit_code(self) -> int | None:
        """The exit code: None while the process runs, negative if a signal ended it."""
        return self._process.exitcode

    @property
    def holds_memory(self) -> bool:
        """Whether the state is LOADING, SERVING or DRAINING, so that a model may be in memory."""
        busy = (ProcessState.LOADING, ProcessState.SERVING, ProcessState.DRAINING)
        return self.state in busy

    def look(self) -> ProcessState:
        """Read the process's reports, and check whether it has ended. Returns the new state."""
        has_ended = self._process.exitcode is not None  # checked before reading the last reports
        with suppress(EOFError, OSError):
            while self._line.poll():
                self._take_note(*self._line.recv())
        if has_ended:
            self.state = ProcessState.ENDED
        return self.state

    def load(self, *, is_alone: bool) -> None:
        """Order the process to load its model. `is_alone` is True if memory has no other model."""
        self.state, self.has_room = ProcessState.LOADING, True
        self._send(Order.LOAD_ALONE if is_alone else Order.LOAD)

    def drain(self) -> None:
        """Order the process to claim no further requests, finish running requests, and end."""
        self.state = ProcessState.DRAINING
        self._send(Order.DRAIN)

    def stop(self) -> None:
        """Order the process to give running requests back to the queue, and end."""
        self.state = ProcessState.DRAINING
        self._send(Order.STOP)

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        self._process.kill()
        self._process.join()
        self._line.close()

    def _take_note(self, report: Report, text: str, known: Known | None) -> None:
        self.known = known or self.known
        if report is Report.FAILED:
            self.failure = text
        elif report is Report.NO_ROOM:
            self.has_room = False
        elif report is Report.REGISTERED and self.state is ProcessState.STARTING:
            self.state = ProcessState.STANDBY
        elif report is Report.SERVING and self.state is ProcessState.LOADING:
            self.state, self.served = ProcessState.SERVING, text

    def _send(self, order: Order) -> None:
        with suppress(OSError):  # the process has ended; `look` will notice
            self._line.send((order, self.known))
