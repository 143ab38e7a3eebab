"""A process that serves one of several models, seen from its owner."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from promptq.shared.settings.common import Settings
from promptq.worker.swapping.standby import Known, Order, Report

Target = Callable[[Settings, str, Connection], None]


class ProcessState(Enum):
    """The state of a process. It has a model in memory from LOADING to DRAINING."""

    STARTING = auto()
    STANDBY = auto()
    LOADING = auto()
    SERVING = auto()
    DRAINING = auto()
    ENDED = auto()


def forking(*libraries: str) -> ForkServerContext:
    """Returns a context whose processes have already imported these modules, which takes seconds.

    It forks them from a process that does nothing else: this one has threads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*libraries])
    return context


@contextmanager
def _not_importing_from_here() -> Iterator[None]:
    """Keep the fork server, which the first start starts, from importing from the current folder.
    Afterwards this process and its later children are as before."""
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
    """Runs `target` with the settings, the server's address and a line to this owner.

    The process ends when the owner does: it drains once the line is closed.
    """

    def __init__(
        self,
        context: ForkServerContext,
        target: Target,
        settings: Settings,
        redis_url: str,
        known: Known | None = None,
    ) -> None:
        """Start the process. `known` is the verdict of an earlier process of this model."""
        self.has_room = True
        """Whether its model fits beside those that are in memory."""
        self.failure = ""
        """Why it ended, in a sentence, if it knew that."""
        self.served = ""
        """Its ready line, once it serves."""
        self.known = known
        self._state = ProcessState.STARTING
        self._line, its_end = context.Pipe()
        self._process = context.Process(target=target, args=(settings, redis_url, its_end))
        with _not_importing_from_here():
            self._process.start()
        its_end.close()

    @property
    def state(self) -> ProcessState:
        return self._state

    @property
    def exit_code(self) -> int | None:
        """Exit code: None while it runs; negative for the signal that ended it."""
        return self._process.exitcode

    @property
    def holds_memory(self) -> bool:
        """Whether a model is in its memory, or on the way there."""
        busy = (ProcessState.LOADING, ProcessState.SERVING, ProcessState.DRAINING)
        return self._state in busy

    def look(self) -> ProcessState:
        """Read the process' reports and whether it has ended. Returns the new state."""
        has_ended = self._process.exitcode is not None  # before its last words are read
        with suppress(EOFError, OSError):
            while self._line.poll():
                self._take_note(*self._line.recv())
        if has_ended:
            self._state = ProcessState.ENDED
        return self._state

    def load(self, *, is_alone: bool) -> None:
        """Order it to load its model; `is_alone` says that no other model is in memory."""
        self._state, self.has_room = ProcessState.LOADING, True
        self._send(Order.LOAD_ALONE if is_alone else Order.LOAD)

    def drain(self) -> None:
        """Order it to claim no more, finish running requests, and end."""
        self._state = ProcessState.DRAINING
        self._send(Order.DRAIN)

    def stop(self) -> None:
        """Order it to give back running requests, and end."""
        self._state = ProcessState.DRAINING
        self._send(Order.STOP)

    def kill(self) -> None:
        """End it for certain, and wait for that."""
        self._process.kill()
        self._process.join()
        self._line.close()

    def _take_note(self, what: Report, text: str, known: Known | None) -> None:
        self.known = known or self.known
        if what is Report.FAILED:
            self.failure = text
        elif what is Report.NO_ROOM:
            self.has_room = False
        elif what is Report.REGISTERED and self._state is ProcessState.STARTING:
            self._state = ProcessState.STANDBY
        elif what is Report.SERVING and self._state is ProcessState.LOADING:
            self._state, self.served = ProcessState.SERVING, text

    def _send(self, order: Order) -> None:
        with suppress(OSError):  # it has ended, which is seen at the next look
            self._line.send((order, self.known))
