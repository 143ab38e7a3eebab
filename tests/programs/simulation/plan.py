"""The plan of a world, drawn from its seed before the world begins. So a part of the plan can be
left out."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from tests.programs.chaos.processes.fleet import LEASE_MS


class Fault(StrEnum):
    """Kinds of faults. When a fault ends a process, its place starts a new process."""

    KILL = "kill a worker"
    DRAIN = "drain a worker"
    FREEZE = "freeze a worker"
    FREEZE_CLIENT = "freeze a client"
    KILL_CLIENT = "kill a client"
    KILL_GATEWAY = "kill a gateway"
    DRAIN_GATEWAY = "drain a gateway"
    FREEZE_GATEWAY = "freeze a gateway"
    KILL_JOBS = "kill a process of jobs"
    FREEZE_JOBS = "freeze a process of jobs"
    CUT = "cut all connections of a process"
    CUT_ONE = "cut a connection"
    LOSE_REPLY = "lose a reply"
    LOSE_MESSAGES = "lose messages of channels"
    FALSE_CANCELS = "report cancels that did not happen"
    HOLD = "hold all bytes of a process"
    REFUSE = "refuse connections of a process"
    RESTART = "kill the server"
    OUTAGE = "kill the server for long"
    DISK_FULL = "fill the disk of the server"
    JUMP = "move the clock of a process"


OF_SERVER = frozenset({Fault.RESTART, Fault.OUTAGE, Fault.DISK_FULL})
"""Faults of the server. They cost workers only leases shorter than `LONG_LEASE_MS`."""

_WEIGHTS: dict[Fault, float] = {
    Fault.KILL: 4,
    Fault.DRAIN: 2,
    Fault.FREEZE: 3,
    Fault.FREEZE_CLIENT: 1,
    Fault.KILL_CLIENT: 2,
    Fault.CUT: 2,
    Fault.CUT_ONE: 4,
    Fault.LOSE_REPLY: 5,
    Fault.LOSE_MESSAGES: 3,
    Fault.FALSE_CANCELS: 1,
    Fault.HOLD: 3,
    Fault.REFUSE: 1,
    Fault.JUMP: 1,
    Fault.RESTART: 1,
    Fault.OUTAGE: 0.3,
    Fault.DISK_FULL: 1,
}
_WEIGHTS_OF_GATEWAYS: dict[Fault, float] = {
    Fault.KILL_GATEWAY: 3,
    Fault.DRAIN_GATEWAY: 2,
    Fault.FREEZE_GATEWAY: 3,
}
_FEW_KINDS: tuple[dict[Fault, float], ...] = (
    {Fault.LOSE_MESSAGES: 1},
    {Fault.LOSE_REPLY: 2, Fault.REFUSE: 1, Fault.DRAIN: 2},
    {Fault.RESTART: 2, Fault.OUTAGE: 1, Fault.DISK_FULL: 2},
    {Fault.DISK_FULL: 1, Fault.FALSE_CANCELS: 2, Fault.DRAIN: 2},
)
"""Kinds of faults of worlds that have no other kinds, so that their effects meet."""
_WEIGHTS_OF_JOBS: dict[Fault, float] = {Fault.KILL_JOBS: 3, Fault.FREEZE_JOBS: 3}
LONG_LEASE_MS = 4000
"""Long enough that all workers renew their leases after an outage before any reaper reaps."""
_LONGEST_SECONDS = 2.5 * LEASE_MS / 1000
_LONGEST_OUTAGE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault at a time of the world. `choice` (0 to 1) selects the fault's process or
    connection."""

    at: float
    kind: Fault
    choice: float
    seconds: float
    """How long it lasts, or how soon the process comes back."""


def _plan_faults(
    rng: random.Random, weights: dict[Fault, float], count: int, seconds: float
) -> list[PlannedFault]:
    """Returns `count` faults within `seconds`, in order."""
    kinds = rng.choices(list(weights), list(weights.values()), k=count)
    times = sorted(seconds * rng.random() for _ in kinds)
    return [
        PlannedFault(
            at,
            kind,
            rng.random(),
            (_LONGEST_OUTAGE_SECONDS if kind is Fault.OUTAGE else _LONGEST_SECONDS)
            * rng.random()
            * rng.random(),
        )
        for at, kind in zip(times, kinds, strict=True)
    ]


@dataclass(frozen=True)
class Plan:
    """The choices that a seed makes before the world begins."""

    seed: int
    num_workers: int
    num_clients: int
    num_requests: int
    seconds: float
    """Seconds in which the requests are sent and the faults happen."""
    faults: tuple[PlannedFault, ...]
    lease_ms: int = LEASE_MS
    num_gateways: int = 0
    """If there are gateways, one more process of clients calls them."""
    num_leaders: int = 0
    """Processes of jobs that may lead. If there are any, one more process runs their upkeep."""
    aging_ms: int = 60_000
    """Milliseconds by which a level of priority moves a request in the queue."""
    affinity_ms: int = 0
    shortest_first_ms: int = 0
    log_ttl_ms: int = 60_000
    """Milliseconds after a request's end until its log expires."""

    @classmethod
    def of(cls, seed: int, most_requests: int | None = None) -> Plan:
        """Returns the plan of a seed. With `most_requests`, the plan has at most this number of
        requests."""
        rng = random.Random(f"{seed} plan")
        seconds = rng.choice([1.0, 2.0, 4.0])
        num_gateways = rng.choice([0, 0, 1, 2])
        num_leaders = 2 * (rng.random() < 1 / 16)
        weights = _WEIGHTS | (_WEIGHTS_OF_GATEWAYS if num_gateways else {})
        weights |= _WEIGHTS_OF_JOBS if num_leaders else {}
        weights = rng.choice([*[weights] * 4, *_FEW_KINDS])
        return cls(
            seed=seed,
            num_workers=rng.randint(1, 3),
            num_clients=rng.randint(1, 2),
            num_requests=min(rng.randint(20, 200), most_requests or 200),
            seconds=seconds,
            faults=tuple(_plan_faults(rng, weights, rng.choice([0, 5, 10, 20]), seconds)),
            lease_ms=rng.choice([LEASE_MS, LEASE_MS, LONG_LEASE_MS]),
            num_gateways=num_gateways,
            num_leaders=num_leaders,
            aging_ms=rng.choice([200, 60_000]),
            affinity_ms=rng.choice([0, 200]),
            shortest_first_ms=rng.choice([0, 300]),
            log_ttl_ms=rng.choice([60_000, 60_000, 200]),
        )

    @property
    def kills_server(self) -> bool:
        return any(fault.kind in (Fault.RESTART, Fault.OUTAGE) for fault in self.faults)

    @property
    def config(self) -> dict[str, int]:
        """The settings of the queue."""
        names = "aging_ms", "affinity_ms", "shortest_first_ms", "log_ttl_ms"
        return {name: getattr(self, name) for name in names}
