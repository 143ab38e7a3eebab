"""What a run was, and what its records and its server tell of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import redis

from promptq.shared.protocol.keys import QUEUES, Keys
from tests.programs.chaos.audit.auditor import Snapshot, Violation, audit
from tests.programs.chaos.audit.records import (
    Expected,
    Queue,
    Seen,
    read_claimed,
    read_seen,
    read_sent,
)
from tests.programs.chaos.audit.snapshot import find_strays, take_snapshot
from tests.programs.chaos.processes.earlier import EARLIER_LOG


class Server(Protocol):
    """The server of a run, or its cluster."""

    def opened(self) -> AbstractContextManager[redis.Redis]: ...

    def key_names(self) -> Iterable[str]: ...


@dataclass(slots=True)
class Outcome:
    """What a run was and what it found."""

    seed: int
    seconds: float
    faults: Counter[str] = field(default_factory=Counter)
    ends: dict[Queue, Counter[str]] = field(default_factory=dict)
    requests: Counter[tuple[Queue, str]] = field(default_factory=Counter)
    """By queue, and kind and final state."""
    num_swallowed: int = 0
    """Replies that were in fact swallowed: a link that sends nothing has none."""
    num_streams: int = 0
    num_events: int = 0
    num_carried_on: int = 0
    """Streams in which several attempts speak."""
    passed_on: Counter[str] = field(default_factory=Counter)
    """How often one went from a worker of one release to a worker of the other, by direction."""
    violations: list[Violation] = field(default_factory=list)
    caught_after: float | None = None
    """Seconds of faults until a mutant was caught; None if only the end told, or nothing did."""

    @property
    def num_requests(self) -> int:
        return sum(self.requests.values())

    @property
    def num_deaths(self) -> int:
        """Workers that went without giving anything back."""
        return sum(ends["killed"] + ends["poisoned"] for ends in self.ends.values())

    def audit(
        self,
        folder: Path,
        server: Server,
        references: dict[str, Expected],
        places: Mapping[Queue, Mapping[str, int | None]] | None = None,
    ) -> None:
        """Hold the records in the folder against the server.

        `places` are the workers of each queue and their process ids, all idle now. None while the
        run goes on: only the requests that have ended are looked at.
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
        self.requests = Counter((it.queue, f"{it.kind} {state}") for it, state in told)
        logs = sorted(folder.glob("*.log"))
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
