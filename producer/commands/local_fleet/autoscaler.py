"""Autoscaling on this machine: starts and stops workers as the load of their queue requires."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from promptq.producer.admin.autoscaling import Scaling
from promptq.producer.admin.autoscaling_defaults import HOLD_SECONDS, TARGET_SECONDS
from promptq.producer.admin.queue_stats import QueueStats
from promptq.producer.clients.sync_client import Client
from promptq.producer.commands.local_fleet.supervisor import Supervisor
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.runtime.printable import printable

_READ_SECONDS = 5.0
_PAUSE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """The smallest and the largest number of workers that may run."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> WorkerRange:
        """Returns the range for a text such as `2` or `1-4`. Raises ConfigurationError."""
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if most < least:
            raise ConfigurationError(
                f"--workers: {text!r} is not a number or a range, such as 2 or 1-4"
            )
        return cls(least, most)

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most


class Autoscaler:
    """Runs the number of workers that one queue needs. The workers' names are `NAME 1`, `NAME 2`.

    Workers on other machines count too: the autoscaler only starts the missing ones. A separate
    thread calls the server, so that `adjust` never waits. The autoscaler stops a worker only after
    fewer workers have been enough for `hold_seconds`.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        client: Client,
        name: str,
        command: Sequence[str],
        workers: WorkerRange,
        show: Callable[[str], None],
        *,
        target_seconds: float = TARGET_SECONDS,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        self._supervisor = supervisor
        self._client = client
        self._name = name
        self._command = command
        self._range = workers
        self._show = show
        self._target = target_seconds
        self._hold = hold_seconds
        self._latest: tuple[Scaling, QueueStats] | None = None
        self._wanted: list[tuple[float, int]] = []  # (time, wanted number) within the hold time
        self._paused_until = 0.0
        self._last_error = ""
        self._is_over = threading.Event()
        threading.Thread(target=self._keep_reading, daemon=True).start()

    def close(self) -> None:
        """Stops reading the queue's load."""
        self._is_over.set()

    def adjust(self) -> None:
        """Starts or stops workers according to the latest known load. Returns immediately."""
        latest, self._latest = self._latest, None
        if latest is None:
            return
        scaling, stats = latest
        names = {worker.worker_id: self._name_of(worker) for worker in stats.workers}
        num_others = sum(
            worker.state == "running" and names[worker.worker_id] is None and not _is_gone(worker)
            for worker in stats.workers
        )
        now, staying = time.monotonic(), self._supervisor.staying(self._command)
        needed = min(max(scaling.desired - num_others, self._range.least), self._range.most)
        recent = [wish for wish in self._wanted if wish[0] > now - self._hold]
        self._wanted = [*recent, (now, needed)]
        wanted = max(number for _, number in self._wanted)
        if needed > len(staying) and now >= self._paused_until:
            self._add(needed, len(staying), scaling, num_others)
        elif wanted < len(staying):
            self._show_change(wanted, len(staying), scaling, num_others)
            held = {
                names[worker.worker_id]: worker.num_running + worker.num_prefetched
                for worker in stats.workers
            }
            # Stopping the workers with the fewest requests disturbs the fewest requests.
            by_load = sorted(staying, key=lambda name: held.get(name, -1))
            for name in by_load[: len(staying) - wanted]:
                self._supervisor.remove(name)

    def _add(self, needed: int, num_staying: int, scaling: Scaling, num_others: int) -> None:
        """Starts workers. Draining workers count towards the maximum: they still use GPUs."""
        num_processes = len(self._supervisor.processes(self._command))
        num_added = min(needed - num_staying, self._range.most - num_processes)
        if num_added <= 0:
            return
        self._show_change(num_staying + num_added, num_staying, scaling, num_others)
        for _ in range(num_added):
            self._supervisor.add(self._free_name(), self._command, is_extra=True)
        # A worker that cannot start, for example without memory, is not restarted all the time.
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def _show_change(self, wanted: int, before: int, scaling: Scaling, num_others: int) -> None:
        elsewhere = f", and {num_others} are elsewhere" if num_others else ""
        why = f"{scaling.desired} wanted, as {scaling.because}{elsewhere}"
        self._show(f"{self._name}: {wanted} instead of {before} ({why})")

    def _name_of(self, worker: WorkerStats) -> str | None:
        """Returns the name of a worker's process; None if the autoscaler did not start it."""
        if worker.host != socket.gethostname():
            return None
        processes = self._supervisor.processes(self._command)
        return next((name for name, process in processes.items() if process.has(worker.pid)), None)

    def _free_name(self) -> str:
        used = self._supervisor.processes(self._command)
        return next(name for n in count(1) if (name := f"{self._name} {n}") not in used)

    def _keep_reading(self) -> None:
        while not self._is_over.is_set():
            error = ""
            try:
                self._latest = self._client.scaling(self._target), self._client.stats()
            except Exception as problem:  # a wrong record must not end the scaling
                error = str(problem) or type(problem).__name__
            if error and error != self._last_error and not self._is_over.is_set():
                self._show(f"{self._name}: as many workers as before: {printable(error)}")
            self._last_error = error
            self._is_over.wait(_READ_SECONDS)


def _is_gone(worker: WorkerStats) -> bool:
    """Returns whether the worker's process has died, although its last heartbeat is recent."""
    if worker.host != socket.gethostname() or worker.pid <= 0:
        return False
    try:
        os.kill(worker.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's process, or not a process id
        pass
    return False
