"""Looks at the server and at the load of each process, ten times a virtual second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from promptq.shared.protocol.keys import Keys
from tests.programs.chaos.audit.auditor import Violation
from tests.programs.simulation.loop import EPOCH, Process
from tests.programs.simulation.processes import QUEUE, WorkerProgram

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
_LEAST_PART_OF_LEASE = 0.5
"""Without faults, a lease never has less left, so that a failed renewal does not cost it."""
_MOST_SECONDS_SUBSCRIBED = 0.5
"""Seconds after a request's end during which clients may still be subscribed."""
_MOST_SECONDS_IDLE = 0.3
_MOST_SECONDS_WITHOUT_HEARTBEAT = 1.5

Ask = Callable[..., Any]
"""Sends a command to the real server, beside the network of the world."""


@dataclass
class Watch:
    """Collects violations. A promise that stays broken counts once for each process or request."""

    ask: Ask
    lease_ms: int
    violations: dict[tuple[str, str], Violation] = field(default_factory=dict)
    most: Counter[str] = field(default_factory=Counter)
    """The largest value of each measure, from which its limit was chosen."""
    _callbacks: Counter[Process] = field(default_factory=Counter)
    _connections: list[Counter[Process]] = field(default_factory=list)
    _idle_since: float = 0.0
    _subscribed: dict[bytes, float] = field(default_factory=dict)
    """Since when somebody listens to each request, by channel."""

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
            self._limit("hammers", process.name, opened, _MOST_CONNECTIONS, "connections in 1 s")
        for program in workers:
            name, held = program.process.name, program.num_held
            self._limit("holds too much", name, held, _MOST_HELD, "requests")
        if is_calm:
            self._look_at_server(now, [each for each in workers if each.is_serving])
        else:
            self._idle_since = now

    def _limit(self, rule: str, name: str, count: int, most: int, of: str) -> None:
        self._note(rule, count)
        if count > most:
            self._add(rule, name, f"{name}: {count} {of}, at most {most} are expected")

    def _add(self, rule: str, name: str, what: str, request_id: str = "") -> None:
        self.violations.setdefault((rule, name), Violation(rule, request_id, what))

    def _look_at_server(self, now: float, workers: Sequence[WorkerProgram]) -> None:
        """Look at the leases, the backlog, and the heartbeats of workers that serve."""
        leases, num_waiting, channels, *heartbeats = self.ask(
            ("ZRANGE", _KEYS.leases, 0, -1, "WITHSCORES"),
            ("ZCARD", _KEYS.pending),
            ("PUBSUB", "CHANNELS", _KEYS.events("*")),
            *(("HGET", _KEYS.worker(each.worker_id), "heartbeat_at") for each in workers),
        )
        for name, score in zip(leases[::2], leases[1::2], strict=True):
            left = float(score) / 1000 - EPOCH - now
            self._note("ms of a lease", self.lease_ms - left * 1000)
            if left < self.lease_ms / 1000 * _LEAST_PART_OF_LEASE:
                what = f"its lease has {left:.3f} s left"
                self._add("late renewal", name.decode(), what, name.decode())
        self._look_at_channels(now, channels)
        for each, at in zip(workers, heartbeats, strict=True):
            seconds = now - max(int(at or 0) / 1000 - EPOCH, each.ready_at or 0.0)
            self._note("ms since a heartbeat", seconds * 1000)
            if seconds > _MOST_SECONDS_WITHOUT_HEARTBEAT:
                name = each.process.name
                self._add("late heartbeat", name, f"{name}: the last one is {seconds:.3f} s old")
        if not workers or leases or not num_waiting:
            self._idle_since = now
        seconds = now - self._idle_since
        self._note("ms of idle workers", seconds * 1000)
        if seconds > _MOST_SECONDS_IDLE:
            self._add("idle", "", f"all workers idle for {seconds:.3f} s, and requests wait")

    def _look_at_channels(self, now: float, channels: Sequence[bytes]) -> None:
        self._subscribed = {channel: self._subscribed.get(channel, now) for channel in channels}
        for channel, since in self._subscribed.items():
            if now - since > _MOST_SECONDS_SUBSCRIBED:
                request_id = channel.decode().removeprefix(_KEYS.events(""))
                [at] = self.ask(("HGET", _KEYS.request(request_id), "finished_at"))
                if at and now - (int(at) / 1000 - EPOCH) > _MOST_SECONDS_SUBSCRIBED:
                    what = "a client stays subscribed after its end"
                    self._add("still subscribed", request_id, what, request_id)

    def _note(self, name: str, value: float) -> None:
        self.most[name] = max(self.most[name], round(value))


def check_idle(
    ask: Ask,
    num_commands: Mapping[str, int],
    workers: Iterable[WorkerProgram],
) -> Iterator[Violation]:
    """Checks workers and subscribers after `IDLE_SECONDS` in which all requests were over.

    `num_commands` is the number of commands of each worker in that time.
    """
    for program in workers:
        name = program.process.name
        if num_commands[name] > _MOST_IDLE_COMMANDS:
            what = f"{name} sends {num_commands[name]} commands in {IDLE_SECONDS:g} s"
            yield Violation("spins", "", what)
        if program.worker is None or not program.is_serving:
            continue
        if held := len(program.worker.leases) + program.worker.leases.num_running:
            yield Violation("still held", "", f"{name} holds {held} leases after all ends")
        [slots] = ask(("HGET", _KEYS.slots(program.worker_id), "slots"))
        if slots not in (None, b"[]"):
            yield Violation("stale batch", "", f"{name} reports {slots!r} after all ends")
    [channels] = ask(("PUBSUB", "CHANNELS", _KEYS.events("*")))
    if channels:
        what = f"{len(channels)} channels of requests that have ended"
        yield Violation("still subscribed", "", what)


def check_listed(ask: Ask, drained: Iterable[WorkerProgram]) -> Iterator[Violation]:
    """Checks that workers that have ended in order are no longer listed."""
    [listed] = ask(("ZRANGE", _KEYS.workers, 0, -1))
    for program in drained:
        if program.worker_id.encode() in listed:
            yield Violation("still listed", "", f"{program.process.name} has ended")


def check_statistics(ask: Ask, num_finished: int) -> Iterator[Violation]:
    """Checks that the queue's statistics count no request twice."""
    counted, entries = ask(
        ("HGET", f"{_KEYS.statistics}:open", "finished"), ("XRANGE", _KEYS.statistics, "-", "+")
    )
    num_counted = int(counted or 0)
    for _, fields in entries:
        num_counted += int(dict(zip(fields[::2], fields[1::2], strict=True))[b"finished"])
    if num_counted > num_finished:
        what = f"{num_counted} requests count as finished, and {num_finished} are"
        yield Violation("wrong statistics", "", what)
