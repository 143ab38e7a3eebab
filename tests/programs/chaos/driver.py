"""Runs server, proxy, workers, clients and faults, and then the audit."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from promptq.producer.clients.async_client import AsyncClient
from promptq.shared.protocol.keys import Keys
from promptq.shared.server.cluster import client_of
from tests.programs.chaos.audit.auditor import Violation, check_endings, check_refusals
from tests.programs.chaos.audit.outcome import Outcome, hold_names, told_since
from tests.programs.chaos.audit.records import (
    FLEET,
    Expected,
    Journal,
    Kind,
    Queue,
    Seen,
    SeenEvent,
    Sent,
)
from tests.programs.chaos.processes.earlier import SHARES, Release
from tests.programs.chaos.processes.fleet import CRASH_BACKOFF_MS, LEASE_MS, Fleet
from tests.programs.chaos.processes.group import ForkedMember, ProcessGroup
from tests.programs.chaos.processes.server import ChaoticCluster, PersistentServer
from tests.programs.chaos.requests import TEMPLATES
from tests.programs.chaos.schedule import (
    MEAN_SECONDS,
    MEAN_SECONDS_OF_LAYERS,
    MEAN_SECONDS_WHILE_SWAPPING,
    MEAN_SECONDS_WITH_ENGINES,
    Fault,
    carry_out,
    schedule,
)
from tests.programs.states.mutants import CHAOS_VARIABLE
from tests.programs.traces.append_only import RECORD_VARIABLE, SERVER_SETTINGS, write_trace
from tests.support.fork_server import WORKER, fork_server
from tests.support.network import Network
from tests.support.roles import as_role

if TYPE_CHECKING:
    from tests.programs.chaos.processes.engines import Engines  # with torch and transformers

WORKERS = {Queue.VOLUME: 4, Queue.REAL: 2, Queue.POISON: 2, Queue.FIRST: 1}
NUM_UPSTREAM_WORKERS = 3
RATES = {
    Queue.VOLUME: 7.0,
    Queue.REAL: 0.25,
    Queue.POISON: 0.5,
    Queue.FIRST: 5.0,
    Queue.SECOND: 5.0,
    Queue.UPSTREAM: 24.0,
}
"""Requests a second."""

SCENARIOS: dict[str, tuple[Sequence[Queue], Mapping[Fault, float]]] = {
    "fleet": (FLEET, MEAN_SECONDS),
    "layers": ((Queue.REAL,), MEAN_SECONDS_OF_LAYERS),
    "swapping": ((Queue.FIRST, Queue.SECOND), MEAN_SECONDS_WHILE_SWAPPING),
    "engines": ((Queue.UPSTREAM,), MEAN_SECONDS_WITH_ENGINES),
}
"""The queues that get requests, and the faults."""

_NUM_CLIENTS = 2
_PATIENCE_SECONDS = 60.0
"""The longest time without an ended request while requests are open, after all faults."""
_PATIENCE_WITH_MUTANTS_SECONDS = 10.0
"""Longer than a lease and a subscriber's silence, after which a lost event would have come."""
_PATIENCE_WITH_CIRCLES = 5
"""Factor of the longest time in which requests may change without any of them ending."""
_PATIENCE_UNDISTURBED_SECONDS = 600.0
"""The longest time of each answer before any fault, loading included. It is a tenth of this with a
mutant, under which a request may never end."""
_CONFIG = {
    "result_ttl_ms": 12 * 3600 * 1000,
    "crash_backoff_ms": CRASH_BACKOFF_MS,
    "overflow_ms": 2000,
    "affinity_ms": 200,
    "shortest_first_ms": 300,
}
_SETTLING_MS = 1000
"""Time after the last end, from which on a worker's heartbeat must report an idle worker."""
_LOOK_SECONDS = 0.1
_WATCH_SECONDS = 0.5


class Role(StrEnum):
    """Groups of processes. Each group has a separate proxy to the server, which faults can cut."""

    WORKERS = "workers"
    PRODUCERS = "producers"
    SUBSCRIBERS = "subscribers"


_ROLES = {
    Fault.CUT_WORKERS: Role.WORKERS,
    Fault.CUT_PRODUCERS: Role.PRODUCERS,
    Fault.CUT_SUBSCRIBERS: Role.SUBSCRIBERS,
    Fault.SWALLOW_WORKERS: Role.WORKERS,
    Fault.SWALLOW_PRODUCERS: Role.PRODUCERS,
    Fault.SWALLOW_SUBSCRIBERS: Role.SUBSCRIBERS,
    Fault.STALL_WORKERS: Role.WORKERS,
    Fault.STALL_SUBSCRIBERS: Role.SUBSCRIBERS,
    Fault.SLOW_WORKERS: Role.WORKERS,
    Fault.SLOW_PRODUCERS: Role.PRODUCERS,
    Fault.SLOW_SUBSCRIBERS: Role.SUBSCRIBERS,
}


class Run:
    """One run in `folder`, which keeps the logs and the records.

    `scale` is a factor on the rates of requests. With a `mutant`, all processes send the scripts of
    that name in CHAOS_MUTANTS, and the run ends at the first violation. With an `earlier` release,
    half of the clients are of that release, and the fleet is updated and rolled back during the
    run. With a `cluster`, the queues are on the cluster. `engines` are the inference servers behind
    the workers of Queue.UPSTREAM. The run stops the cluster and the engines. A `model` replaces the
    shipped model. `record` is the file for a trace of all calls. With `record`, processes have no
    roles, because no role may write the trace.
    """

    def __init__(
        self,
        seed: int,
        seconds: float,
        folder: Path,
        scale: float = 1.0,
        *,
        queues: Iterable[Queue] = FLEET,
        means: Mapping[Fault, float] = MEAN_SECONDS,
        mutant: str = "",
        earlier: Release | None = None,
        cluster: ChaoticCluster | None = None,
        engines: Engines | None = None,
        model: Path | None = None,
        record: Path | None = None,
    ) -> None:
        self.outcome = Outcome(seed, seconds)
        self._folder = folder
        self._scale = scale
        self._queues = list(queues)
        self._means = means
        self._mutant = mutant
        self._earlier = earlier
        self._record = record
        self._environment = {CHAOS_VARIABLE: mutant, RECORD_VARIABLE: "1" if record else ""}
        self._group = ProcessGroup()
        settings = SERVER_SETTINGS if record else ()
        self._server = PersistentServer(folder, self._group, settings)
        self._cluster = cluster
        self._engines = engines
        self._model = model
        self._roads = {role: Network(self._server.port) for role in Role}
        self._clients: list[ForkedMember] = []
        self._refused: list[str] = []
        self._server_is_ours = asyncio.Lock()
        self._started = time.monotonic()

    async def run(self) -> Outcome:
        await self._group.start()
        try:
            if self._cluster is None:
                await self._server.start()
            with self._audited.opened() as client:
                for queue in Queue:
                    keys = Keys(queue)
                    is_sharded = self._cluster is not None and queue is Queue.VOLUME
                    config = _CONFIG | {"pubsub": "sharded" if is_sharded else "plain"}
                    client_of(client, keys).hset(keys.config, mapping=config)
            upstream: list[list[str]] = []
            if self._engines is not None:
                await self._engines.start()
                upstream = [self._engines.options(it) for it in range(NUM_UPSTREAM_WORKERS)]
            self._fleet = Fleet(
                {queue: WORKERS.get(queue, 0) for queue in self._queues},
                self._url("worker", Role.WORKERS),
                self._folder,
                self._group,
                self._environment,
                self._earlier,
                upstream,
                self._model,
            )
            try:
                await self._disturb()
            finally:  # else places would start workers in a group that has ended
                await self._fleet.leave()
        finally:
            await self._group.end()
            for road in self._roads.values():
                road.close()
            if self._cluster is not None:
                self._cluster.stop()
            if self._engines is not None:
                self._engines.kill()
        self.outcome.num_swallowed = sum(it.num_swallowed for it in self._roads.values())
        self.outcome.ends = {queue: self._fleet.ends(queue) for queue in self._queues}
        if self._record is not None:
            write_trace(self._folder, self._record, f"chaos, seed {self.outcome.seed}", LEASE_MS)
        return self.outcome

    async def _disturb(self) -> None:
        """Start the fleet and the clients, carry out the faults, and audit."""
        if self._earlier is not None:
            self._fleet.share_with_earlier(SHARES[0])
        await self._fleet.start()
        references = {}
        if self._engines is not None:
            references = await asyncio.to_thread(self._engines.references)
        if Queue.REAL in self._queues:
            self._say("the shipped model answers without faults")
            references = await self._ask_references()
        if not self.outcome.violations:
            await self._start_clients()
            self._say(f"faults come for {self.outcome.seconds:g} s")
        if self.outcome.violations or (self._mutant and await self._catch(references)):
            return
        if not self._mutant:
            await self._hurt()
        await self._close(references)

    @property
    def _audited(self) -> PersistentServer | ChaoticCluster:
        return self._cluster or self._server

    def _url(self, name: str, role: Role) -> str:
        """Roles on the server are this release's. With an earlier release there are no roles, and
        none for a trace."""
        url = self._cluster.url if self._cluster else self._roads[role].address
        return as_role("" if self._earlier or self._record else name, url)

    async def _close(self, references: dict[str, Expected]) -> None:
        """Let all requests end, and audit."""
        self._say("faults are over; what was accepted ends")
        await self._let_finish()
        await self._let_workers_tell()
        self._say("auditing")
        # Workers reach the server through proxies in this loop: their heartbeats go on meanwhile.
        await asyncio.to_thread(self._audit, references, is_over=True)
        await self._fleet.end()
        if self._cluster is None:
            await self._server.stop()
        self.outcome.ends = {queue: self._fleet.ends(queue) for queue in self._queues}
        self.outcome.violations += self._bad_ends()
        if self._engines is not None:
            self.outcome.violations += [it async for it in self._engines.busy()]

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._started:6.1f} s  {what}", flush=True)

    async def _ask_references(self) -> dict[str, Expected]:
        """Asks the shipped model for its answers, one request at a time and without faults.

        With some mutants a request fails even then, which is a violation already.
        """
        references = {}
        patience = _PATIENCE_UNDISTURBED_SECONDS / (10 if self._mutant else 1)
        journal = Journal(self._folder / "references.jsonl")
        async with AsyncClient(as_role("producer", self._audited.url), Queue.REAL) as client:
            for name, fields in TEMPLATES.items():
                request_id = await client.enqueue(request_id=f"reference-{name}", **fields)
                seen = Seen("reference", request_id, [])
                try:
                    async with asyncio.timeout(patience):
                        async for event in client.stream(request_id):
                            seen.events.append(SeenEvent.of(event))
                except TimeoutError:
                    told = f"no end of {name}, though nothing disturbs it"
                    self.outcome.violations.append(Violation("unfinished", request_id, told))
                    break
                reason = seen.events[-1].finish_reason or ""
                references[name] = Expected(seen.token_ids, seen.text, reason)
                journal.write(
                    Sent(request_id, Queue.REAL, Kind.PLAIN, fields, name, answers=[request_id])
                )
                journal.write(seen)
        journal.close()
        return references

    async def _start_clients(self) -> None:
        urls = [
            self._url("producer", Role.PRODUCERS),
            self._url("subscriber", Role.SUBSCRIBERS),
        ]
        for number in range(_NUM_CLIENTS):
            name = f"clients-{number}"
            rates = [f"{it}={RATES[it] * self._scale / _NUM_CLIENTS}" for it in self._queues]
            release = self._earlier if number % 2 == 0 else None
            with (self._folder / f"{name}.log").open("ab") as log:
                process = self._group.fork(
                    release.server if release else fork_server(WORKER),
                    "-m",
                    release.clients if release else "tests.programs.chaos.processes.clients",
                    *[name, str(self.outcome.seed), *urls],
                    *[str(self._folder / f"{name}.jsonl"), *rates],
                    stdout=log,
                    stderr=log,
                    env={**(release.environment if release else os.environ), **self._environment},
                    cwd=release.folder if release else None,
                )
            self._clients.append(process)

    async def _hurt(self) -> None:
        """Carry out the schedule of faults."""
        planned = schedule(self.outcome.seed, self.outcome.seconds, self._means)
        updating = [] if self._earlier is None else [self._update()]
        await asyncio.gather(
            carry_out(planned, self.outcome.seconds, self._action, self.outcome.faults), *updating
        )

    async def _update(self) -> None:
        """Update from the earlier release to this one and back, a part of the fleet at a time."""
        for share in SHARES:
            self._fleet.share_with_earlier(share)
            await asyncio.sleep(self.outcome.seconds / len(SHARES))

    async def _catch(self, references: dict[str, Expected]) -> bool:
        """Carry out the schedule until an ended request shows a violation. Returns if one did."""
        started = time.monotonic()
        hurting = asyncio.create_task(self._hurt())
        while not hurting.done() and not self.outcome.violations:
            await asyncio.wait({hurting}, timeout=_WATCH_SECONDS)
            with suppress(redis.RedisError):  # the server may just be down
                await asyncio.to_thread(self._audit, references)
        if self.outcome.violations:
            self.outcome.caught_after = time.monotonic() - started
        hurting.cancel()
        with suppress(asyncio.CancelledError):
            await hurting
        return bool(self.outcome.violations)

    async def _action(self, fault: Fault, rng: random.Random) -> bool:
        """Inflict a fault. Returns whether there was a target."""
        match fault.name.split("_")[0]:
            case "KILL":
                return self._signal(fault, signal.SIGKILL, rng)
            case "DRAIN":
                return self._signal(fault, signal.SIGTERM, rng)
            case "FREEZE":
                places = self._fleet.of(_queue_of(fault))
                seconds = LEASE_MS / 1000 * rng.uniform(1.3, 3)
                return bool(places) and await rng.choice(places).freeze(seconds)
            case "RELAY":
                return await self._freeze_in_turn(rng)
            case "MODEL":
                places = self._fleet.of(Queue.FIRST)
                return bool(places) and rng.choice(places).kill_model(rng)
            case "ENGINE":
                return self._engines is not None and await self._engines.hurt(fault, rng)
            case "SCALE":
                return self._fleet.scale(Queue.VOLUME, rng)
            case "PRIMARY" | "SLOT":
                return await self._change_cluster(fault, rng)
            case "SERVER":
                is_kill = fault is Fault.SERVER_KILL
                return await self._restart_server(is_kill, down_seconds=rng.uniform(0, 0.7))
        road, share = self._roads[_ROLES[fault]], rng.uniform(0.2, 1)
        match fault.name.split("_")[0]:
            case "CUT":
                return road.cut_some(share, rng) > 0
            case "SWALLOW":
                road.swallow_some(share, rng)
                return True
            case "STALL":
                road.hold()
                await asyncio.sleep(LEASE_MS / 1000 * rng.uniform(1.2, 2.5))
                road.let_flow()
            case "SLOW":
                road.slow(rng.uniform(0.01, 0.1))
                await asyncio.sleep(rng.uniform(1, 3))
                road.slow(0.0)
        return True

    def _signal(self, fault: Fault, number: signal.Signals, rng: random.Random) -> bool:
        places = self._fleet.of(_queue_of(fault))
        return bool(places) and rng.choice(places).send(number)

    async def _freeze_in_turn(self, rng: random.Random) -> bool:
        """Stop a worker until others have its requests, and stop the others when it wakes.

        No other worker is faster then, so only the fence keeps the worker from continuing.
        """
        lease_seconds = LEASE_MS / 1000
        places = self._fleet.of(Queue.VOLUME)
        first = rng.choice(places) if places else None
        if first is None or not await first.freeze(lease_seconds * rng.uniform(1.3, 1.8)):
            return False
        others = [place for place in self._fleet.of(Queue.VOLUME) if place is not first]
        seconds = lease_seconds * rng.uniform(1, 2)
        await asyncio.gather(*(place.freeze(seconds) for place in others))
        return True

    async def _restart_server(self, is_kill: bool, down_seconds: float) -> bool:
        async with self._server_is_ours:
            self._refused += self._server.refusals()  # which it forgets
            await self._server.stop(signal.SIGKILL if is_kill else signal.SIGTERM)
            await asyncio.sleep(down_seconds)
            await self._server.start()
        return True

    async def _change_cluster(self, fault: Fault, rng: random.Random) -> bool:
        assert self._cluster is not None
        async with self._server_is_ours:
            if fault is Fault.PRIMARY_KILL:
                self._refused += self._cluster.refusals()
                await asyncio.to_thread(self._cluster.kill_primary, rng)
            else:
                at_once = fault is Fault.SLOT_MOVE_AT_ONCE
                await asyncio.to_thread(self._cluster.move_slot, rng, at_once=at_once)
        return True

    @property
    def _patience(self) -> float:
        return _PATIENCE_WITH_MUTANTS_SECONDS if self._mutant else _PATIENCE_SECONDS

    async def _let_finish(self) -> None:
        """Stop faults and requests. All accepted requests must now end."""
        self._fleet.want_all()
        for process in self._clients:
            process.terminate()
        patience = self._patience
        waits: list[Coroutine[Any, Any, Any]] = [process.wait() for process in self._clients]
        ending = asyncio.gather(*waits)
        most_looks = _PATIENCE_WITH_CIRCLES * patience / _LOOK_SECONDS
        with self._audited.opened() as client:
            last: tuple[int, ...] = ()
            changed, looks = time.monotonic(), 0
            while (
                not ending.done() and time.monotonic() - changed < patience and looks < most_looks
            ):
                await asyncio.sleep(_LOOK_SECONDS)
                progress = await asyncio.to_thread(self._progress, client)
                looks = looks + 1 if progress[:1] == last[:1] else 0
                if progress != last:
                    last, changed = progress, time.monotonic()
        for process in self._clients:
            if process.returncode is None:  # it writes down what it has
                process.terminate()
        await asyncio.wait({ending}, timeout=patience)
        for process in self._clients:
            if process.returncode is None:  # not even that; its exit code tells
                process.kill()
        await ending

    def _progress(self, client: redis.Redis) -> tuple[int, ...]:
        """Returns numbers that change while anything happens. The first counts ended requests."""
        sizes = sum(path.stat().st_size for path in self._folder.glob("*.jsonl"))
        held = [
            client_of(client, Keys(queue)).zcard(name)
            for queue in Queue
            for name in hold_names(Keys(queue))
        ]
        return (sizes, *held)

    async def _let_workers_tell(self) -> None:
        """Wait until every worker runs and has reported that it is idle. Others are violations."""
        give_up_at = time.monotonic() + self._patience
        silent = self._fleet.telling
        with self._audited.opened() as client:
            seconds, microseconds = client.time()
            since = seconds * 1000 + microseconds // 1000 + _SETTLING_MS
            while silent and time.monotonic() < give_up_at:
                await asyncio.sleep(_LOOK_SECONDS)
                told = {it: told_since(client, Keys(it), since) for it in self._queues}
                silent = [it for it in silent if it.pid not in told[it.queue]]

    def _audit(self, references: dict[str, Expected], is_over: bool = False) -> None:
        places = self._fleet.pids() if is_over else None
        self.outcome.audit(self._folder, self._audited, references, places)
        if self._cluster is not None and is_over:
            self.outcome.violations[:0] = self._cluster.unasked()
        refused = [*self._refused, *self._audited.refusals()]
        self.outcome.violations += check_refusals(dict.fromkeys(refused))

    def _bad_ends(self) -> Iterator[Violation]:
        """Yields processes whose end the run did not cause. Clients must have ended cleanly."""
        yield from check_endings(self._fleet.endings)
        for process in self._clients:
            if process.returncode != 0:
                yield Violation("bad exit", "", f"clients: exit code {process.returncode}")


def _queue_of(fault: Fault) -> Queue:
    return Queue[fault.name.partition("_")[2] or "VOLUME"]
