"""Kills, freezes and cuts off real processes, and audits all streams.

`--mutant lost-fence` has all processes send scripts that are broken in one place, until that is
caught; `--mutant all` takes everything in `states/mutants.py`, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from tests.programs.chaos.audit.outcome import Outcome, mutant_table, report
from tests.programs.chaos.audit.records import Queue
from tests.programs.chaos.driver import Run
from tests.programs.chaos.processes.earlier import LAST_RELEASE, check_out
from tests.programs.chaos.processes.server import ChaoticCluster
from tests.programs.chaos.schedule import MEAN_SECONDS, MEAN_SECONDS_ON_A_CLUSTER, Fault
from tests.programs.states.mutants import CHAOS_MUTANTS


def main() -> int:
    """Exit code 1 at any violation; of mutants, if there is none."""
    parser = argparse.ArgumentParser(prog="python -m tests chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long faults come")
    parser.add_argument("--seed", type=int, default=None, help="of the faults and the requests")
    parser.add_argument("--load", type=float, default=1.0, help="factor on the rate of requests")
    parser.add_argument("--keep", type=Path, help="a new folder for logs and records")
    parser.add_argument(
        "--queues", nargs="+", type=Queue, default=list(Queue), help="which there are, of all"
    )
    parser.add_argument(
        "--beside-last-release", action="store_true", help="share the queues with the last release"
    )
    parser.add_argument(
        "--cluster", choices=["valkey", "redis-server"], help="on a Redis Cluster of this program"
    )
    parser.add_argument(
        "--may-lose", action="store_true", help="its primaries die before all is replicated"
    )
    parser.add_argument(
        "--mutant", choices=[*CHAOS_MUTANTS, "all"], help="broken scripts, to be caught"
    )
    options = parser.parse_args()
    names = [""] if options.mutant is None else [options.mutant]
    if options.mutant == "all":
        names = list(CHAOS_MUTANTS)
    for folder in [options.keep / name for name in names] if options.keep else []:
        if folder.exists():
            parser.error(f"--keep: {folder} is there already; each run takes a new folder")
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"chaos: seed {seed}", flush=True)
    if options.mutant:
        outcomes = {name: run(options, seed, name) for name in names}
        print(mutant_table(outcomes))
        return 0 if all(it.violations for it in outcomes.values()) else 1
    outcome = run(options, seed)
    print(report(outcome))
    return 1 if outcome.violations else 0


def run(options: argparse.Namespace, seed: int, mutant: str = "") -> Outcome:
    """One run; `--keep` has a folder in it for each mutant."""
    with tempfile.TemporaryDirectory(prefix="promptq-chaos-") as temporary:
        folder = Path(temporary)
        if options.keep is not None:
            folder = options.keep / mutant
            folder.mkdir(parents=True, exist_ok=False)
        if mutant:
            print(f"mutant {mutant}", flush=True)
        with tempfile.TemporaryDirectory(prefix="promptq-earlier-") as checkout:
            earlier = None
            if options.beside_last_release:
                earlier = check_out(Path(checkout) / LAST_RELEASE, own_environment=True)
            cluster, means = None, MEAN_SECONDS
            if options.cluster:
                cluster = ChaoticCluster(options.cluster, may_lose=options.may_lose)
                means = dict(MEAN_SECONDS_ON_A_CLUSTER)
                if options.cluster == "redis-server":  # which cannot
                    del means[Fault.SLOT_MOVE_AT_ONCE]
            chaos = Run(
                *(seed, options.seconds, folder, options.load),
                queues=options.queues,
                means=means,
                mutant=mutant,
                earlier=earlier,
                cluster=cluster,
            )
            return asyncio.run(chaos.run())


if __name__ == "__main__":
    sys.exit(main())
