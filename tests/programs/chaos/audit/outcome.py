"""The outcome of a run: its parameters, its records, and the contents of its server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import redis

from promptq.shared.protocol.keys import QUEUES, Keys
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.server.cluster import client_of
from tests.programs.chaos.audit.auditor import Snapshot, Violation, audit
from tests.programs.chaos.audit.records import (
    Expected,
    Queue,
    Seen,
    read_claimed,
    read_seen,
    read_sent,
)
from tests.programs.chaos.processes.earlier import EARLIER_LOG

_PAGE = 1000


def hold_names(keys: Keys) -> list[str]:
    """Returns the sorted sets with the ids of requests that have not ended."""
    return [keys.pending, keys.leases, keys.deadlines, keys.delayed]


def take_snapshot(
    client: redis.Redis, keys: Keys, places: Mapping[str, int | None] | None = None
) -> Snapshot:
    """Returns the contents of the queue on the server. `places` maps the queue's workers to their
    process ids, or to None for a worker that does not run."""
    snapshot, client = Snapshot(), client_of(client, keys)
    _sweep(RequestQueue(client, keys.queue))
    names = [name.decode() for name in client.scan_iter(match=f"{keys.prefix}*", count=_PAGE)]
    for start in range(0, len(names), _PAGE):
        page = names[start : start + _PAGE]
        with client.pipeline(transaction=False) as commands:
            for name in page:
                commands.pttl(name)
                if name.startswith(keys.prefix + "request:"):
                    commands.hgetall(name)
            replies = iter(commands.execute())
        for name in page:
            ttl = next(replies)
            short = name.removeprefix(keys.prefix)
            if short.startswith("request:"):
                snapshot.requests[short.removeprefix("request:")] = _request(next(replies))
            if ttl != -2:  # it went meanwhile
                snapshot.keys[short] = ttl
    by_tenant = [name for name in names if name.startswith(keys.pending + ":")]
    for name in hold_names(keys) + by_tenant:
        ids = [it.decode() for it in client.zrange(name, 0, -1)]
        snapshot.holds[name.removeprefix(keys.prefix)] = ids
    snapshot.workers = list(_workers(client, keys, places or {}))
    told = {int(worker["pid"]) for worker in snapshot.workers}
    snapshot.silent = [name for name, pid in (places or {}).items() if pid not in told]
    return snapshot


def _sweep(queue: RequestQueue) -> None:
    """Sweep like the upkeep does: each round forgets some ids that no worker holds any longer."""
    for _ in range(50):
        cursor = queue.sweep().cursor
        while cursor != "0":
            cursor = queue.sweep(cursor).cursor


def told_since(client: redis.Redis, keys: Keys, since_ms: int) -> set[int]:
    """Returns the process ids of workers with a heartbeat after `since_ms` (the server's time)."""
    found = list(_heartbeats(client_of(client, keys), keys))
    return {int(it["pid"]) for it in found if int(it["heartbeat_at"]) > since_ms}


def find_strays(names: Iterable[str], prefixes: tuple[str, ...]) -> list[str]:
    """Returns the names of keys that belong to no queue."""
    return sorted(name for name in names if not name.startswith(prefixes))


def _request(reply: dict[bytes, bytes]) -> dict[str, Any]:
    fields: dict[str, Any] = {key.decode(): value.decode() for key, value in reply.items()}
    for name in ("result", "history"):
        if name in fields:
            fields[name] = json.loads(fields[name])
    return fields


def _workers(
    client: redis.Redis, keys: Keys, places: Mapping[str, int | None]
) -> Iterator[dict[str, Any]]:
    """Yields the heartbeats of running workers: recently killed workers are still listed."""
    pids = {str(pid) for pid in places.values()}
    return (worker for worker in _heartbeats(client, keys) if worker.get("pid") in pids)


def _heartbeats(client: redis.Redis, keys: Keys) -> Iterator[dict[str, Any]]:
    for worker_id in client.zrange(keys.workers, 0, -1):
        reply = client.hgetall(keys.worker(worker_id.decode()))
        if reply:
            yield {key.decode(): value.decode() for key, value in reply.items()}


class Server(Protocol):
    """The server of a run, or its cluster."""

    def opened(self) -> AbstractContextManager[redis.Redis]: ...

    def key_names(self) -> Iterable[str]: ...


@dataclass(slots=True)
class Outcome:
    """The parameters of a run, and its findings."""

    seed: int
    seconds: float
    faults: Counter[str] = field(default_factory=Counter)
    ends: dict[Queue, Counter[str]] = field(default_factory=dict)
    requests: Counter[tuple[Queue, str]] = field(default_factory=Counter)
    """Numbers of requests, by queue, and by kind, final state and form."""
    num_swallowed: int = 0
    """Number of swallowed replies: a link that sends nothing gets none."""
    num_streams: int = 0
    num_events: int = 0
    num_carried_on: int = 0
    """Number of streams with events of several attempts."""
    passed_on: Counter[str] = field(default_factory=Counter)
    """Number of streams that went from one release's worker to the other's, by direction."""
    num_changes: int = 0
    """Number of times that a worker loaded another model."""
    violations: list[Violation] = field(default_factory=list)
    caught_after: float | None = None
    """Seconds of faults until a mutant was caught; None if none or only the last audit caught
    it."""

    @property
    def num_requests(self) -> int:
        return sum(self.requests.values())

    @property
    def num_deaths(self) -> int:
        """Number of workers that ended without giving requests back."""
        return sum(ends["killed"] + ends["poisoned"] for ends in self.ends.values())

    def audit(
        self,
        folder: Path,
        server: Server,
        references: dict[str, Expected],
        places: Mapping[Queue, Mapping[str, int | None]] | None = None,
    ) -> None:
        """Compare the records in the folder with the server, and store the violations.

        `places` has the workers of each queue and their process ids, when all workers are idle at
        the end. During the run, `places` is None: then only requests that have ended are checked.
        """
        paths = sorted(folder.glob("*.jsonl"))
        sent = [record for path in paths for record in read_sent(path)]
        with server.opened() as client:
            snapshots = {
                queue: take_snapshot(client, Keys(queue), (places or {}).get(queue))
                for queue in Queue
            }
        strays = find_strays(server.key_names(), tuple(Keys(queue).prefix for queue in Queue))
        if places is None:
            snapshots = {it: Snapshot(requests=held.requests) for it, held in snapshots.items()}
        states = [snapshots[it.queue].requests.get(it.request_id, {}).get("state") for it in sent]
        told = zip(sent, states, strict=True)
        self.requests = Counter((it.queue, f"{it.kind} {state}{it.form}") for it, state in told)
        logs = sorted(folder.glob("*.log"))
        self.num_changes = sum(path.read_text().count('"another model') for path in logs)
        claimed = [(path, claim) for path in logs for claim in read_claimed(path)]
        of_earlier = {
            (claim.request_id, claim.attempt): path.name.endswith(EARLIER_LOG)
            for path, claim in claimed
        }
        seen = self._counted((it for path in paths for it in read_seen(path)), of_earlier)
        self.violations = [
            *(Violation("leaked key", "", f"{it} is no queue's") for it in strays if it != QUEUES),
            *audit(sent, seen, snapshots, references, (claim for _, claim in claimed)),
        ]

    def _counted(
        self, streams: Iterable[Seen], of_earlier: Mapping[tuple[str, int], bool]
    ) -> Iterator[Seen]:
        self.num_streams = self.num_events = self.num_carried_on = 0
        self.passed_on.clear()
        for stream in streams:
            self.num_streams += 1
            self.num_events += len(stream.events)
            attempts = list(dict.fromkeys(it.attempt for it in stream.events))
            self.num_carried_on += len(attempts) > 1
            for pair in pairwise(of_earlier.get((stream.request_id, it)) for it in attempts):
                if pair == (True, False):
                    self.passed_on["from the earlier release to this one"] += 1
                elif pair == (False, True):
                    self.passed_on["from this release to the earlier one"] += 1
            yield stream


_MOST_SHOWN = 100


def report(outcome: Outcome) -> str:
    """Returns a text with a table of the injected faults and the violations."""
    return "\n".join(_lines(outcome))


def mutant_table(outcomes: Mapping[str, Outcome]) -> str:
    """Returns a table of the time at which each mutant was caught, and by which rules."""
    rows = ["| mutant | caught after | violations |", "|---|---|---|"]
    for name, outcome in outcomes.items():
        rules = Counter(violation.rule for violation in outcome.violations)
        found = ", ".join(f"{rule} ({count})" for rule, count in rules.most_common())
        when = f"{outcome.caught_after:.0f} s" if outcome.caught_after is not None else "the end"
        rows.append(f"| `{name}` | {when if found else 'not'} | {found} |")
    return "\n".join(rows)


def _lines(outcome: Outcome) -> Iterator[str]:
    yield f"chaos: seed {outcome.seed}, {outcome.seconds:g} s of faults"
    yield ""
    yield "faults injected"
    for fault, count in sorted(outcome.faults.items(), key=lambda it: -it[1]):
        yield f"  {count:7,}  {fault}"
    yield f"  {outcome.num_swallowed:7,}  replies swallowed by these in all"
    yield "workers that ended"
    for queue, ends in outcome.ends.items():
        for reason, count in sorted(ends.items(), key=lambda it: -it[1]):
            yield f"  {count:7,}  {queue}: {reason}"
    yield "requests accepted"
    for (queue, told), count in sorted(outcome.requests.items()):
        yield f"  {count:7,}  {queue}: {told}"
    yield ""
    yield (
        f"{outcome.num_requests:,} requests, {outcome.num_deaths:,} worker deaths,"
        f" {outcome.num_streams:,} streams with {outcome.num_events:,} events,"
        f" {outcome.num_carried_on:,} of them carried on by another worker"
    )
    for way, count in sorted(outcome.passed_on.items()):
        yield f"{count:,} streams passed {way}"
    if outcome.num_changes:
        yield f"{outcome.num_changes:,} changes of model"
    yield f"{len(outcome.violations):,} violations"
    for violation in outcome.violations[:_MOST_SHOWN]:
        yield f"  {violation}"
    if len(outcome.violations) > _MOST_SHOWN:
        yield f"  ... and {len(outcome.violations) - _MOST_SHOWN:,} more"
