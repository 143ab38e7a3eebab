"""Looks at the server and at the load of each process, ten times a virtual second."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.request_queue import POLL_SECONDS
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
_MOST_REFUSED = 100
"""Scripts of a worker that a server with a full disk refuses in a second."""
_LEAST_PART_OF_LEASE = 0.5
"""Without faults, a lease never has less left, so that a failed renewal does not cost it."""
_MOST_SECONDS_SUBSCRIBED = 0.5
"""Seconds after a request's end during which clients may still be subscribed."""
_MOST_SECONDS_IDLE = 0.35
"""Seconds in a calm world that a request waits beside a worker with room, beyond the time for which
claims leave requests to other workers."""
_MOST_SECONDS_UNPOLLED = POLL_SECONDS + _MOST_SECONDS_IDLE
"""Likewise in a world that loses only messages."""
_LEAST_SECONDS_IN_BATCH = 0.25
"""Seconds in the engine after which a request is in the next heartbeat's batch."""
_MOST_SECONDS_WITHOUT_HEARTBEAT = 1.5

Ask = Callable[..., Any]
"""Sends a command to the real server, beside the network of the world."""


@dataclass
class Watch:
    """Collects violations. A promise that stays broken counts once for each process or request."""

    ask: Ask
    lease_ms: int
    affinity_ms: int = 0
    violations: dict[tuple[str, str], Violation] = field(default_factory=dict)
    most: Counter[str] = field(default_factory=Counter)
    """The largest value of each measure, from which its limit was chosen."""
    _callbacks: Counter[Process] = field(default_factory=Counter)
    _calls: list[dict[str, Counter[Process]]] = field(default_factory=list)
    _waiting_since: dict[bytes, float] = field(default_factory=dict)
    """Since when each request waits beside a worker with room."""
    _running_since: dict[tuple[str, str], float] = field(default_factory=dict)
    """Since when each worker runs each request."""
    _subscribed: dict[bytes, float] = field(default_factory=dict)
    """Since when somebody listens to each request, by channel."""

    def look(
        self,
        now: float,
        workers: Iterable[WorkerProgram],
        processes: Iterable[Process],
        calls: Mapping[str, Counter[Process]],
        *,
        is_calm: bool,
        is_quiet: bool,
    ) -> None:
        """Look at all processes and, in a calm or quiet world, at the server.

        `calls` has the number of connections that each process opened, and the number of scripts
        that the server refused. In a quiet world, only losses of messages may still have an effect.
        """
        workers = list(workers)
        self._calls = [*self._calls[-10:], {what: count.copy() for what, count in calls.items()}]
        for process in processes:
            num_callbacks = process.num_callbacks - self._callbacks[process]
            self._callbacks[process] = process.num_callbacks
            self._limit("spins", process.name, num_callbacks, _MOST_CALLBACKS, "callbacks in 0.1 s")
            opened = self._in_last_second("connections", process)
            self._limit("hammers", process.name, opened, _MOST_CONNECTIONS, "connections in 1 s")
        for program in workers:
            name, process = program.process.name, program.process
            self._limit("holds too much", name, program.num_held, program.most_held, "requests")
            refused = self._in_last_second("refused scripts", process)
            self._limit("hammers", name, refused, _MOST_REFUSED, "refused scripts in 1 s")
        serving = [each for each in workers if each.is_serving]
        if is_calm:
            self._look_at_server(now, serving)
        if is_quiet:
            most = _MOST_SECONDS_IDLE if is_calm else _MOST_SECONDS_UNPOLLED
            self._look_at_backlog(now, serving, most + self.affinity_ms / 1000)
        else:
            self._waiting_since.clear()

    def _in_last_second(self, what: str, process: Process) -> int:
        return self._calls[-1][what][process] - self._calls[0][what][process]

    def _limit(self, rule: str, name: str, count: int, most: int, of: str) -> None:
        self._note(rule, count)
        if count > most:
            self._add(rule, name, f"{name}: {count} {of}, at most {most} are expected")

    def _add(self, rule: str, name: str, what: str, request_id: str = "") -> None:
        self.violations.setdefault((rule, name), Violation(rule, request_id, what))

    def _look_at_server(self, now: float, workers: Sequence[WorkerProgram]) -> None:
        """Look at the leases, and at the heartbeats and batches of workers that serve."""
        leases, channels, *of_workers = self.ask(
            ("ZRANGE", _KEYS.leases, 0, -1, "WITHSCORES"),
            ("PUBSUB", "CHANNELS", _KEYS.events("*")),
            *(("HGET", _KEYS.worker(each.worker_id), "heartbeat_at") for each in workers),
            *(("HMGET", _KEYS.slots(each.worker_id), "told_at", "slots") for each in workers),
        )
        heartbeats, batches = of_workers[: len(workers)], of_workers[len(workers) :]
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
        self._look_at_batches(now, workers, batches)

    def _look_at_batches(
        self, now: float, workers: Sequence[WorkerProgram], batches: Sequence[Any]
    ) -> None:
        """Check that the last heartbeat of a worker had the requests that ran then and run now."""
        self._running_since = {
            (each.process.name, request_id): self._running_since.get(
                (each.process.name, request_id), now
            )
            for each in workers
            for request_id in each.running
        }
        for each, (told_at, batch) in zip(workers, batches, strict=True):
            known = {slot["request_id"] for slot in json.loads(batch or b"[]")}
            before = int(told_at or 0) / 1000 - EPOCH - _LEAST_SECONDS_IN_BATCH
            for request_id in sorted(each.running - known):
                if self._running_since[each.process.name, request_id] < before:
                    what = f"{each.process.name} does not report that it runs"
                    self._add("stale batch", request_id, what, request_id)

    def _look_at_backlog(self, now: float, workers: Sequence[WorkerProgram], most: float) -> None:
        """Check that no request waits for more than `most` seconds beside a worker with room."""
        has_room = any(each.has_room for each in workers)
        [waiting] = self.ask(("ZRANGE", _KEYS.pending, 0, -1)) if has_room else [[]]
        self._waiting_since = {each: self._waiting_since.get(each, now) for each in waiting}
        for request_id, since in self._waiting_since.items():
            self._note(f"ms beside a worker with room, at most {most}", (now - since) * 1000)
            if now - since > most:
                what = f"it waits for {now - since:.3f} s beside a worker with room"
                self._add("idle", request_id.decode(), what, request_id.decode())

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


def check_given_back(ask: Ask, worker: WorkerProgram) -> Iterator[Violation]:
    """Checks that no lease belongs to a worker that has ended in order, and that the server has
    answered the worker's last claim."""
    if worker.has_unanswered_claim:
        what = f"{worker.process.name} has ended, and perhaps holds requests of a lost reply"
        yield Violation("left behind", "", what)
    [held] = ask(("ZRANGE", _KEYS.leases, 0, -1))
    holders = ask(*(("HGET", _KEYS.request(each.decode()), "worker") for each in held))
    for request_id, holder in zip(held, holders, strict=True):
        if holder == worker.worker_id.encode():
            what = f"{worker.process.name} has ended and still holds {request_id.decode()}"
            yield Violation("left behind", request_id.decode(), what)


def check_listed(ask: Ask, drained: Iterable[WorkerProgram]) -> Iterator[Violation]:
    """Checks that the queue no longer lists workers that have ended in order."""
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
