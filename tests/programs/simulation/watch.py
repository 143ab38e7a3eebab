"""Looks at a world ten times a virtual second: at the server's state, and at each process's load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from promptq.shared.protocol.keys import Keys
from tests.programs.chaos.audit.auditor import Violation
from tests.programs.chaos.processes.fleet import LEASE_MS
from tests.programs.simulation.loop import EPOCH, Process
from tests.programs.simulation.processes import QUEUE, ClientProgram, WorkerProgram

LOOK_SECONDS = 0.1
IDLE_SECONDS = 1.0
_KEYS = Keys(QUEUE)

_MOST_IDLE_COMMANDS = 30
"""Commands of a worker in `IDLE_SECONDS` without requests. It needs 15 at most."""
_MOST_CALLBACKS = 5000
"""Callbacks of a process between two looks."""
_MOST_CONNECTIONS = 1000
"""Connections of a process in a second."""
_MOST_HELD = 20
"""Requests that a worker holds: its 9 places, and those that it takes in 100 ms."""
_LEAST_SECONDS_OF_LEASE = LEASE_MS / 1000 / 2
"""Without faults, a lease never has less left, so that a failed renewal does not cost it."""
_MOST_SECONDS_IDLE = 0.3
_MOST_SECONDS_WITHOUT_HEARTBEAT = 1.5

Ask = Callable[..., Any]
"""Sends a command to the real server, beside the network of the world."""


@dataclass
class Watch:
    """Collects violations. A promise that stays broken counts once for each process or request."""

    ask: Ask
    violations: dict[tuple[str, str], Violation] = field(default_factory=dict)
    _callbacks: Counter[Process] = field(default_factory=Counter)
    _connections: list[Counter[Process]] = field(default_factory=list)
    _idle_since: float | None = None
    most: Counter[str] = field(default_factory=Counter)

    def look(
        self,
        now: float,
        workers: Iterable[WorkerProgram],
        processes: Iterable[Process],
        connections: Counter[Process],
        is_calm: bool,
    ) -> None:
        """Look at all processes and, in a calm world, at the server."""
        workers = list(workers)
        self._connections = [*self._connections[-10:], connections.copy()]
        for process in processes:
            num_callbacks = process.num_callbacks - self._callbacks[process]
            self._callbacks[process] = process.num_callbacks
            self._limit("spins", process.name, num_callbacks, _MOST_CALLBACKS, "callbacks in 0.1 s")
            opened = connections[process] - self._connections[0][process]
            kind="hammers" if process.name.startswith("worker") else "hammers (client)"
            self._limit(kind, process.name, opened, _MOST_CONNECTIONS, "connections in 1 s")
        for program in workers:
            held = len(program.worker.leases) if program.worker else 0
            self._limit("holds too much", program.process.name, held, _MOST_HELD, "requests")
        if is_calm:
            self._look_at_leases(now)
            self._look_at_heartbeats(now, workers)
            self._look_at_backlog(now, workers)

    def _limit(self, rule: str, name: str, count: int, most: int, of: str) -> None:
        self.most[rule] = max(self.most[rule], count)
        if count > most:
            self._add(rule, name, f"{name}: {count} {of}, at most {most} are expected")

    def _add(self, rule: str, name: str, what: str, request_id: str = "") -> None:
        self.violations.setdefault((rule, name), Violation(rule, request_id, what))

    def _look_at_leases(self, now: float) -> None:
        reply = self.ask("ZRANGE", _KEYS.leases, 0, -1, "WITHSCORES")
        for name, score in zip(reply[::2], reply[1::2], strict=True):
            left = float(score) / 1000 - EPOCH - now
            self.most["lease used (ms)"] = max(
                self.most["lease used (ms)"], int(LEASE_MS - left * 1000)
            )
            if left < _LEAST_SECONDS_OF_LEASE:
                what = f"its lease has {left:.3f} s left"
                self._add("late renewal", name.decode(), what, name.decode())

    def _look_at_heartbeats(self, now: float, workers: Iterable[WorkerProgram]) -> None:
        for program in workers:
            ready_at = program.ready_at
            if ready_at is None or program.stop.is_set() or program.worker is None:
                continue
            at = self.ask("HGET", _KEYS.worker(program.worker.worker_id), "heartbeat_at")
            seconds = now - max(int(at or 0) / 1000 - EPOCH, ready_at)
            self.most["heartbeat (ms)"] = max(self.most["heartbeat (ms)"], int(seconds * 1000))
            if seconds > _MOST_SECONDS_WITHOUT_HEARTBEAT:
                name = program.process.name
                self._add("late heartbeat", name, f"{name}: the last one is {seconds:.3f} s old")

    def _look_at_backlog(self, now: float, workers: Iterable[WorkerProgram]) -> None:
        can_work = any(program.ready_at is not None for program in workers)
        waits = self.ask("ZCARD", _KEYS.pending) and not self.ask("ZCARD", _KEYS.leases)
        if not (can_work and waits):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        else:
            seconds = now - self._idle_since
            self.most["idle (ms)"] = max(self.most["idle (ms)"], int(seconds * 1000))
            if seconds > _MOST_SECONDS_IDLE:
                self._add("idle", "", f"all workers idle for {seconds:.3f} s, and requests wait")


def check_idle(
    ask: Ask,
    num_commands: Mapping[str, int],
    workers: Iterable[WorkerProgram],
    clients: Iterable[ClientProgram],
) -> Iterator[Violation]:
    """Checks workers and subscribers after `IDLE_SECONDS` in which all requests were over.

    `num_commands` is the number of commands of each worker in that time.
    """
    for program in workers:
        name = program.process.name
        if num_commands[name] > _MOST_IDLE_COMMANDS:
            what = f"{name} sends {num_commands[name]} commands in {IDLE_SECONDS:g} s"
            yield Violation("spins", "", what)
        if program.worker is None or program.ready_at is None:
            continue
        if held := len(program.worker.leases) + program.worker.leases.num_running:
            yield Violation("still held", "", f"{name} holds {held} leases after all ends")
        slots = ask("HGET", _KEYS.slots(program.worker.worker_id), "slots")
        if slots not in (None, b"[]"):
            yield Violation("stale batch", "", f"{name} reports {slots!r} after all ends")
    for client in clients:
        if client.main.done() and (channels := ask("PUBSUB", "CHANNELS", _KEYS.events("*"))):
            what = f"{len(channels)} channels of requests that have ended"
            yield Violation("still subscribed", "", what)
            break


def check_statistics(ask: Ask, num_finished: int) -> Iterator[Violation]:
    """Checks that the queue's statistics count each request that a worker has ended, once."""
    counted = int(ask("HGET", f"{_KEYS.statistics}:open", "finished") or 0)
    for _, fields in ask("XRANGE", _KEYS.statistics, "-", "+"):
        counted += int(dict(zip(fields[::2], fields[1::2], strict=True))[b"finished"])
    if counted > num_finished:
        what = f"{counted} requests count as finished, and {num_finished} are"
        yield Violation("wrong statistics", "", what)
