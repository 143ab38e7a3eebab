"""Keeps worker, gateway and jobs processes running."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from promptq.producer.commands.local_fleet.child_process import ChildProcess
from promptq.shared.errors import PromptqError

DRAIN_SECONDS = 30.0
"""Seconds that a process has to exit before it is killed."""

_MAX_FAILURES = 5
_STEADY_SECONDS = 60.0
_FIRST_BACKOFF_SECONDS = 0.5
_LOOK_SECONDS = 0.1


class WorkersFailedError(PromptqError):
    """Processes exit as soon as they start. Their output is printed above the error."""


@dataclass
class _Place:
    """A process to keep running: its command, and the current process."""

    name: str
    command: tuple[str, ...]
    process: ChildProcess
    started: float
    failures: int = 0
    restart_at: float | None = None
    is_leaving: bool = False
    """Whether the process was removed, so that it is not restarted after its exit."""
    is_extra: bool = False
    """Whether the other processes continue if this process does not start."""


class Supervisor:
    """Starts processes, restarts processes that die, and stops them all.

    `commands` maps a name such as `worker 2` to its command. `show` prints a line of output.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        env: Mapping[str, str],
        show: Callable[[str], None],
    ) -> None:
        self._env = env
        self._show = show
        self._once_ready: set[tuple[str, ...]] = set()
        self._places: list[_Place] = []
        for name, command in commands.items():
            self.add(name, command)

    def run(
        self,
        is_over: Callable[[], bool],
        at_each_look: Sequence[Callable[[], None]] = (),
        once_ready: Callable[[], None] | None = None,
    ) -> None:
        """Keeps the processes running until `is_over` returns True.

        Calls all `at_each_look` regularly, and `once_ready` as soon as all processes are ready, but
        only once. Raises WorkersFailedError if a process cannot run.
        """
        while not is_over():
            for place in [*self._places]:
                self._look_after(place)
            if once_ready and all(place.process.is_ready for place in self._places):
                once_ready()
                once_ready = None
            for action in at_each_look:
                action()
            time.sleep(_LOOK_SECONDS)

    def add(self, name: str, command: Sequence[str], *, is_extra: bool = False) -> None:
        """Starts one more process. If an extra process keeps exiting, the others continue."""
        process = self._start(name, command)
        place = _Place(name, tuple(command), process, time.monotonic(), is_extra=is_extra)
        self._places.append(place)

    def staying(self, command: Sequence[str]) -> dict[str, ChildProcess]:
        """Returns the processes that run a command, by name, except those that were removed."""
        return {place.name: place.process for place in self._of(command) if not place.is_leaving}

    def processes(self, command: Sequence[str]) -> dict[str, ChildProcess]:
        """Returns all processes that run a command, by name, including removed ones."""
        return {place.name: place.process for place in self._of(command)}

    def _of(self, command: Sequence[str]) -> list[_Place]:
        return [place for place in self._places if place.command == tuple(command)]

    def remove(self, name: str) -> None:
        """Makes one process finish its work and exit. The process is not restarted."""
        for place in self._places:
            if place.name == name:
                place.is_leaving = True
                place.process.drain()

    def drain(self, is_enough: Callable[[], bool]) -> None:
        """Makes all processes finish their work and exit. Kills the remaining processes when
        `is_enough()` is true, or after DRAIN_SECONDS."""
        deadline = time.monotonic() + DRAIN_SECONDS
        for place in self._places:
            place.process.drain()
        while any(place.process.exit_code is None for place in self._places):
            if is_enough() or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        for place in self._places:
            place.process.kill()

    def _start(self, name: str, command: Sequence[str]) -> ChildProcess:
        return ChildProcess(command, self._env, lambda line: self._show(f"{name} | {line}"))

    def _look_after(self, place: _Place) -> None:
        if place.process.is_ready:
            self._once_ready.add(place.command)
        if place.is_leaving:
            if place.process.exit_code is not None:
                place.process.wait()
                self._places.remove(place)
        elif place.restart_at is not None:
            if time.monotonic() >= place.restart_at:
                place.restart_at = None
                place.started = time.monotonic()
                place.process = self._start(place.name, place.command)
        elif (exit_code := place.process.exit_code) is not None:
            place.process.wait()
            self._plan_restart(place, exit_code)

    def _plan_restart(self, place: _Place, exit_code: int) -> None:
        was_steady = time.monotonic() - place.started > _STEADY_SECONDS
        place.failures = 1 if was_steady else place.failures + 1
        by_itself = 0 < exit_code < 128
        never_ready = place.command not in self._once_ready
        is_hopeless = (by_itself and never_ready) or place.failures >= _MAX_FAILURES
        if is_hopeless and place.is_extra and not never_ready:
            self._places.remove(place)
            self._show(
                f"{place.name} ended with exit code {exit_code}; the others continue without it"
            )
            return
        if is_hopeless:
            times = "" if place.failures == 1 else f" {place.failures} times in a row"
            raise WorkersFailedError(
                f"{place.name} ended{times} with exit code {exit_code}; its last lines are above"
            )
        seconds = _FIRST_BACKOFF_SECONDS * 2 ** (place.failures - 1)
        place.restart_at = time.monotonic() + seconds
        self._show(f"{place.name} ended with exit code {exit_code}; starts again in {seconds:g} s")
