"""Starts and ends workers of one queue on this machine, as the load asks for them."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from promptq.producer.admin.queue_stats import QueueStats
from promptq.producer.admin.scaling import TARGET_SECONDS, Scaling
from promptq.producer.clients.sync_client import Client
from promptq.producer.commands.local_fleet.supervisor import Supervisor
from promptq.shared.errors import ConfigurationError, PromptqError, RedisSideError
from promptq.shared.protocol.worker_stats import WorkerStats

_READ_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """From how few to how many workers there may be."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> WorkerRange:
        """`2`, or a range such as `1-4`. Raises ConfigurationError."""
        found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if most < least:
            raise ConfigurationError(
                f"--workers: {text!r} is not a number or a range, such as 2 or 1-4"
            )
        return cls(least, most)

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most


class Autoscaler:
    """Keeps as many workers of one queue as it needs. They are called `NAME 1`, `NAME 2`.

    Workers of other machines count too: these are only added to them. Its calls wait for the server
    in a thread of their own, so that nobody waits while it is away.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        client: Client,
        name: str,
        command: Sequence[str],
        workers: WorkerRange,
        show: Callable[[str], None],
        target_seconds: float = TARGET_SECONDS,
    ) -> None:
        self._supervisor = supervisor
        self._client = client
        self._name = name
        self._command = command
        self._range = workers
        self._show = show
        self._target = target_seconds
        self._latest: tuple[Scaling, QueueStats] | None = None
        threading.Thread(target=self._read_on, daemon=True).start()

    def adjust(self) -> None:
        """Start or end workers if there is news. It does not wait."""
        latest, self._latest = self._latest, None
        if latest is None:
            return
        scaling, stats = latest
        own = self._supervisor.staying(self._command)
        names = {it.worker_id: self._name_of(it) for it in stats.workers}
        num_others = sum(
            it.state != "draining" and names[it.worker_id] is None for it in stats.workers
        )
        wanted = min(max(scaling.desired - num_others, self._range.least), self._range.most)
        if wanted == len(own):
            return
        self._show(f"{self._name}: {wanted} instead of {len(own)}, as {scaling.reason.words}")
        for _ in range(wanted - len(own)):
            self._supervisor.add(self._free_name(), self._command)
        held = {names[it.worker_id]: it.num_running + it.num_prefetched for it in stats.workers}
        # Whoever holds the least loses the least. One that does not serve yet has nothing.
        for name in sorted(own, key=lambda it: held.get(it, -1))[: len(own) - wanted]:
            self._supervisor.remove(name)

    def _name_of(self, worker: WorkerStats) -> str | None:
        """The name of the process that is this worker; None if it is not one of these."""
        if worker.host != socket.gethostname():
            return None
        processes = self._supervisor.processes(self._command)
        return next((name for name, it in processes.items() if it.has(worker.pid)), None)

    def _free_name(self) -> str:
        taken = self._supervisor.processes(self._command)
        return next(name for n in count(1) if (name := f"{self._name} {n}") not in taken)

    def _read_on(self) -> None:
        is_away = False
        while True:
            try:
                self._latest = self._client.scaling(self._target), self._client.stats()
                is_away = False
            except PromptqError as error:
                if not is_away:
                    self._show(f"{self._name}: as many workers as before: {error}")
                is_away = isinstance(error, RedisSideError)
            time.sleep(_READ_SECONDS)
