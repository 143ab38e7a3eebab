"""Runs real workers and clients with simulated time, network and faults."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tests.programs.simulation import clock
from tests.programs.simulation.finding import find_all
from tests.programs.simulation.mutants import ALL_MUTANTS, GROUPS

if TYPE_CHECKING:
    from tests.programs.simulation.plan import Plan
    from tests.programs.simulation.world import Result
    from tests.programs.traces.recorder import Recorder

SERVERS = {"redis-server": "redis-server", "valkey-server": "embedded"}
"""The kinds of servers by the names of their programs (`tests.support.servers.PROGRAMS`)."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, help="number of worlds (100; 1 with --plan)")
    parser.add_argument("--seed", type=int, default=1, help="first seed (%(default)s)")
    parser.add_argument("--most-requests", type=int, help="most requests of a world")
    parser.add_argument("--plan", type=Path, help="run the plan in this file, from its seed on")
    parser.add_argument("--shrink", type=Path, help="file for the first failing plan, shrunk")
    parser.add_argument("--trace", type=Path, help="file for the stories of the worlds")
    parser.add_argument("--record", type=Path, help="file for the calls of the only world")
    parser.add_argument(
        "--mutant", type=_mutants, default=(), metavar="NAMES", help=_HELP_OF_MUTANTS
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants at the same time")
    parser.add_argument(
        "--server", choices=SERVERS, default="", help="default: redis-server if it is installed"
    )
    parser.add_argument("--fleets", type=int, nargs="+", metavar="WORKERS", help=_HELP_OF_FLEETS)
    parser.add_argument("--real", action="store_true", help=_HELP_OF_REAL)
    parser.add_argument("--quotes", nargs="*", metavar="LOAD", help=_HELP_OF_QUOTES)
    parser.add_argument("--seconds", type=float, default=300.0, help="with --quotes (%(default)s)")
    parser.add_argument("--affinity", type=int, metavar="MS", help=_HELP_OF_AFFINITY)
    parser.add_argument("--scale", type=float, default=1, help="with --affinity: size of the loads")
    parser.add_argument("--hashes", action="store_true", help="print the hash of each world")
    arguments = parser.parse_args()
    if arguments.seeds is None:
        arguments.seeds = 1 if arguments.plan else 100
    if arguments.seeds < 1:
        parser.error(f"--seeds: {arguments.seeds} is below 1")
    for name in ("record", "shrink", "trace"):
        path = getattr(arguments, name)
        if path and not path.parent.is_dir():
            parser.error(f"--{name}: there is no folder {path.parent}")
    if arguments.record and arguments.seeds != 1:
        parser.error("--record: a trace is of one world, so add --seeds 1")
    return arguments


_HELP_OF_MUTANTS = """names of mutants (`mutants.py`) with commas between, or `python`, `parts`,
`scripts` or `all`: break promptq in one place, and stop at the first violation; several mutants are
printed as a table of the number of worlds after which each is found"""


_HELP_OF_FLEETS = """measure instead what fleets with these numbers of workers cost their server"""

_HELP_OF_QUOTES = """compare instead quotes with the real ends of requests, at these loads (all)"""

_HELP_OF_REAL = """with --fleets: compare instead the speed of each fleet with that of real
processes whose engines take as long"""


_HELP_OF_AFFINITY = """with --fleets: compare instead the queue's setting affinity_ms with 0"""


def _mutants(text: str) -> list[str]:
    names = [*GROUPS.get(text, text.split(","))]
    if unknown := [name for name in names if name not in ALL_MUTANTS]:
        raise argparse.ArgumentTypeError(f"no mutant is named {unknown[0]!r}")
    return names


def main() -> int:
    """Run the simulated worlds. Returns the exit code: 1 after a violation."""
    arguments = _arguments()
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    if len(arguments.mutant) > 1:
        return _print_table(arguments, seeds)
    clock.install()  # before the modules of promptq are imported
    if arguments.mutant:
        ALL_MUTANTS[arguments.mutant[0]].install()
    from tests.programs.simulation.plan import Plan
    from tests.programs.simulation.server import compile_library
    from tests.programs.simulation.shrinking import read_plan
    from tests.programs.simulation.world import run_world

    plans: Iterable[Plan] = (Plan.of(seed, arguments.most_requests) for seed in seeds)
    if arguments.plan:
        try:
            plan = read_plan(arguments.plan)
            plans = [replace(plan, seed=plan.seed + number) for number in range(arguments.seeds)]
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    send_logs_to_story(bool(arguments.trace))
    gc.collect()
    gc.freeze()
    summary = _Summary()
    kind = SERVERS.get(arguments.server, "")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        library = compile_library(folder)
        if arguments.fleets:
            return _print_fleets(arguments, library, kind)
        if arguments.quotes is not None:
            return _print_quotes(arguments, seeds, library, kind)
        story = stack.enter_context(arguments.trace.open("w")) if arguments.trace else None
        for plan in plans:
            recorder = stack.enter_context(_recorder(arguments.record, plan))
            result = run_world(plan, library, story=story, recorder=recorder, server_kind=kind)
            summary.add(result)
            if arguments.hashes:
                print(plan.seed, result.digest, flush=True)
            if result.violations:
                print(f"seed {plan.seed}: {len(result.violations)} violations")
                for violation in result.violations[:10]:
                    print(f"  {violation}", flush=True)
                if arguments.shrink:
                    _shrink(result, library, arguments.shrink, kind)
                if arguments.shrink or arguments.mutant:
                    break
    print(summary)
    return int(summary.num_failed > 0)


def _print_table(arguments: argparse.Namespace, seeds: range) -> int:
    """Prints how each mutant is found. Returns 1 if one is not."""
    names, kind = arguments.mutant, SERVERS.get(arguments.server, "")
    num_missed = 0
    print("| mutant | worlds | violations |\n|---|---|---|", flush=True)
    for found in find_all(names, seeds, arguments.most_requests, kind, arguments.jobs):
        num_missed += not found.rules
        print(found, flush=True)
    print(f"{num_missed} of {len(names)} mutants not found")
    return int(num_missed > 0)


def _print_fleets(arguments: argparse.Namespace, library: Path, kind: str) -> int:
    from tests.programs.simulation.fleet_costs import HEAD, NUM_REQUESTS, measure

    if arguments.affinity:
        return _print_affinity(arguments, library, kind)
    if arguments.real:
        return _print_speeds(arguments, library, kind)
    num_requests = arguments.most_requests or NUM_REQUESTS
    print(HEAD, flush=True)
    for num_workers in arguments.fleets:
        print(measure(num_workers, num_requests, arguments.seed, library, kind), flush=True)
    return 0


def _print_quotes(arguments: argparse.Namespace, seeds: range, library: Path, kind: str) -> int:
    from tests.programs.simulation.quotes import HEAD, LOADS, judge, row

    print(HEAD, flush=True)
    for load in arguments.quotes or LOADS:
        found = judge(load, seeds, arguments.seconds, library, kind)
        print(row(load, found), flush=True)
    return 0


def _print_affinity(arguments: argparse.Namespace, library: Path, kind: str) -> int:
    from tests.programs.simulation import affinity

    print(affinity.HEAD, flush=True)
    for load, num_workers, ms in product(affinity.LOADS, arguments.fleets, (0, arguments.affinity)):
        served = affinity.measure(
            load, num_workers, ms, arguments.seed, arguments.scale, library, kind
        )
        print(served.row(load, num_workers, ms), flush=True)
    return 0


def _print_speeds(arguments: argparse.Namespace, library: Path, kind: str) -> int:
    from tests.programs.simulation import real_time

    num_requests = arguments.most_requests or real_time.NUM_REQUESTS
    print(real_time.HEAD, flush=True)
    for num_workers in arguments.fleets:
        plan = real_time.plan_of(num_workers, num_requests, arguments.seed)
        print(real_time.in_processes(plan), flush=True)
        print(real_time.in_a_world(plan, library, kind), flush=True)
    return 0


@contextmanager
def _recorder(path: Path | None, plan: Plan) -> Iterator[Recorder | None]:
    """Yields the recorder of a world whose trace goes to `path`, if any."""
    if path is None:
        yield None
        return
    from tests.programs.traces.recorder import Recorder
    from tests.programs.traces.trace_file import TraceWriter

    with path.open("w") as file:
        writer = TraceWriter(file, f"simulation, seed {plan.seed}", plan.lease_ms)
        yield Recorder(writer)
        writer.end()


def _shrink(result: Result, library: Path, path: Path, kind: str) -> None:
    """Writes the smallest plan that breaks one of the promises that this world broke."""
    from tests.programs.simulation.shrinking import shrink, write_plan
    from tests.programs.simulation.world import run_world

    rules = {violation.rule for violation in result.violations}

    def still_fails(plan: Plan) -> bool:
        print(f"  tries {len(plan.faults)} faults, {plan.num_requests} requests", flush=True)
        return any(
            violation.rule in rules
            for violation in run_world(plan, library, server_kind=kind).violations
        )

    write_plan(shrink(result.plan, still_fails), path)
    print(f"  {path} has the shrunk plan; --plan {path} --trace FILE writes its story")


class _Summary:
    """The sums of all worlds."""

    def __init__(self) -> None:
        self.num_failed = 0
        self._totals: Counter[str] = Counter()
        self._most_settled = 0.0
        self._started, self._cpu_started = time.monotonic(), time.process_time()

    def add(self, result: Result) -> None:
        self.num_failed += bool(result.violations)
        self._most_settled = max(self._most_settled, result.settle_seconds)
        self._totals.update(
            {
                "worlds": 1,
                "requests": result.num_requests,
                "commands": result.num_commands,
                "callbacks": result.num_callbacks,
                "streams carried on": result.num_carried_on,
                "virtual seconds": round(result.virtual_seconds),
                **{f"fault: {kind}": count for kind, count in result.faults.items()},
            }
        )

    def __str__(self) -> str:
        seconds = time.monotonic() - self._started
        cpu_seconds = time.process_time() - self._cpu_started
        times = os.times()
        server_seconds = times.children_user + times.children_system
        rate = self._totals["requests"] / (cpu_seconds + server_seconds) * 3600
        lines = [f"{count:12,}  {name}" for name, count in self._totals.items()]
        lines += [
            f"all requests end at most {self._most_settled:.1f} virtual s after the faults",
            f"{seconds:.1f} s; {cpu_seconds:.1f} s of CPU here, {server_seconds:.1f} s in servers;"
            f" {rate:,.0f} requests an hour of CPU",
            f"{self.num_failed} worlds failed",
        ]
        return "\n".join(lines)


def send_logs_to_story(is_told: bool) -> None:
    logging.disable()  # of redis-py and asyncio

    def tell(_logger: Any, level: str, line: Any) -> str:
        process: Any = clock.running
        if process is not None:
            fields = {name: value for name, value in line.items() if name != "event"}
            process.loop.tell(process, f"logs {level}: {line['event']} {fields}")
        raise structlog.DropEvent

    level = logging.INFO if is_told else logging.CRITICAL
    structlog.configure(
        processors=[tell], wrapper_class=structlog.make_filtering_bound_logger(level)
    )


if __name__ == "__main__":
    sys.exit(main())
