"""The schedule of a run's faults, which depends only on the seed and the length; and the loop that
inflicts the faults."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from heapq import merge


class Fault(StrEnum):
    """The faults of a run. Requests can also kill their workers (poison), be cancelled, or have
    deadlines."""

    KILL = "SIGKILL of a model-free worker"
    KILL_REAL = "SIGKILL of a shipped-model worker"
    FREEZE = "SIGSTOP beyond the lease of a model-free worker"
    FREEZE_REAL = "SIGSTOP beyond the lease of a shipped-model worker"
    RELAY = "SIGSTOP beyond the lease of a model-free worker, of all others as it wakes"
    DRAIN = "SIGTERM of a model-free worker"
    DRAIN_REAL = "SIGTERM of a shipped-model worker"
    SCALE = "model-free workers drained or started, to another number"
    SERVER_KILL = "SIGKILL of the server"
    SERVER_RESTART = "SIGTERM of the server"
    CUT_WORKERS = "connections of workers cut"
    CUT_PRODUCERS = "connections of producers cut"
    CUT_SUBSCRIBERS = "connections of subscribers cut"
    SWALLOW_WORKERS = "replies to workers swallowed"
    SWALLOW_PRODUCERS = "replies to producers swallowed"
    SWALLOW_SUBSCRIBERS = "replies to subscribers swallowed"
    STALL_WORKERS = "link of workers stalled beyond the lease"
    STALL_SUBSCRIBERS = "link of subscribers stalled"
    SLOW_WORKERS = "link of workers slow"
    SLOW_PRODUCERS = "link of producers slow"
    SLOW_SUBSCRIBERS = "link of subscribers slow"
    PRIMARY_KILL = "SIGKILL of a queue's primary, whose replica takes over"
    SLOT_MOVE = "a queue's slot moved to another primary, key by key"
    SLOT_MOVE_AT_ONCE = "a queue's slot moved to another primary, at once"
    KILL_FIRST = "SIGKILL of a worker with two models"
    DRAIN_FIRST = "SIGTERM of a worker with two models"
    MODEL_KILL = "SIGKILL of a process with one of its models"
    KILL_UPSTREAM = "SIGKILL of a worker before an inference server"
    DRAIN_UPSTREAM = "SIGTERM of a worker before an inference server"
    ENGINE_KILL = "SIGKILL of an inference server"
    ENGINE_FAULT = "an inference server that breaks streams, freezes or refuses requests"


_WAYS = ("SERVER", "CUT", "SWALLOW", "STALL", "SLOW")
"""First words of faults of the server and of connections, whatever the queue."""


MEAN_SECONDS = {
    Fault.KILL: 3.0,
    Fault.KILL_REAL: 20.0,
    Fault.FREEZE: 12.0,
    Fault.FREEZE_REAL: 45.0,
    Fault.RELAY: 15.0,
    Fault.DRAIN: 10.0,
    Fault.DRAIN_REAL: 45.0,
    Fault.SCALE: 5.0,
    Fault.SERVER_KILL: 50.0,
    Fault.SERVER_RESTART: 70.0,
    Fault.CUT_WORKERS: 10.0,
    Fault.CUT_PRODUCERS: 6.0,
    Fault.CUT_SUBSCRIBERS: 5.0,
    Fault.SWALLOW_WORKERS: 8.0,
    Fault.SWALLOW_PRODUCERS: 8.0,
    Fault.SWALLOW_SUBSCRIBERS: 15.0,
    Fault.STALL_WORKERS: 40.0,
    Fault.STALL_SUBSCRIBERS: 30.0,
    Fault.SLOW_WORKERS: 30.0,
    Fault.SLOW_PRODUCERS: 30.0,
    Fault.SLOW_SUBSCRIBERS: 30.0,
}
"""Mean time between faults of each kind. Each kind is a Poisson process."""

MEAN_SECONDS_ON_A_CLUSTER = {
    Fault.KILL: 4.0,
    Fault.KILL_REAL: 30.0,
    Fault.FREEZE: 15.0,
    Fault.DRAIN: 12.0,
    Fault.SCALE: 5.0,
    Fault.PRIMARY_KILL: 20.0,
    Fault.SLOT_MOVE: 12.0,
    Fault.SLOT_MOVE_AT_ONCE: 20.0,
}
"""Mean times on a cluster, which is reached without the proxy that spoils connections."""

MEAN_SECONDS_OF_LAYERS = {
    **{fault: mean for fault, mean in MEAN_SECONDS.items() if fault.name.startswith(_WAYS)},
    Fault.KILL_REAL: 4.0,
    Fault.FREEZE_REAL: 12.0,
    Fault.DRAIN_REAL: 10.0,
}
"""Mean times for a fleet of workers with a real model, which ends as often as model-free ones."""

MEAN_SECONDS_WHILE_SWAPPING = {
    Fault.KILL_FIRST: 15.0,
    Fault.DRAIN_FIRST: 15.0,
    Fault.MODEL_KILL: 15.0,
}
MEAN_SECONDS_WITH_ENGINES = {
    Fault.KILL_UPSTREAM: 6.0,
    Fault.DRAIN_UPSTREAM: 25.0,
    Fault.ENGINE_KILL: 5.0,
    Fault.ENGINE_FAULT: 10.0,
}

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, order=True, slots=True)
class Planned:
    """A fault at `at` seconds after the start; `chance` (0 to 1) selects target and severity."""

    at: float
    fault: Fault
    chance: float


def schedule(
    seed: int, seconds: float, means: Mapping[Fault, float] = MEAN_SECONDS
) -> Iterator[Planned]:
    """Yields all faults of a run in order of time, each kind at least once in the first half. Kinds
    that are not in `means` do not occur."""
    return merge(*(_of_kind(fault, seed, seconds, mean) for fault, mean in means.items()))


def _of_kind(fault: Fault, seed: int, seconds: float, mean: float) -> Iterator[Planned]:
    rng = random.Random(f"{seed} {fault.name}")
    at = rng.expovariate(1 / mean)
    if at > seconds / 2:
        early = random.Random(f"{seed} {fault.name} early")
        yield Planned(early.uniform(0, seconds / 2), fault, early.random())
    while at < seconds:
        yield Planned(at, fault, rng.random())
        at += rng.expovariate(1 / mean)


async def carry_out(
    planned: Iterable[Planned],
    seconds: float,
    act: Callable[[Fault, random.Random], Awaitable[bool]],
    counts: Counter[str],
) -> None:
    """Inflict each fault at its time, and count it. Returns after `seconds`, when all faults are
    over.

    `act` returns False while there is no target, and is then called again until the end.
    """
    started = time.monotonic()

    async def inflict(each: Planned) -> None:
        rng = random.Random(each.chance)
        while not await act(each.fault, rng):
            if time.monotonic() >= started + seconds:
                return
            await asyncio.sleep(_LOOK_SECONDS)  # models take long to load; until then nobody is up
        counts[each.fault] += 1

    async with asyncio.TaskGroup() as group:
        for each in planned:
            await asyncio.sleep(max(0.0, started + each.at - time.monotonic()))
            group.create_task(inflict(each))
        await asyncio.sleep(max(0.0, started + seconds - time.monotonic()))
