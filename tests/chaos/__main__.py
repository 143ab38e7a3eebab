"""`make chaos ARGS="--seconds 3600 --seed 7"`: real processes under seeded faults, and an audit."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos.driver import Run
from tests.chaos.report import report


def main() -> int:
    """Exit code 1 at any violation."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long faults come")
    parser.add_argument("--seed", type=int, default=None, help="of the faults and the requests")
    parser.add_argument("--load", type=float, default=1.0, help="factor on the rate of requests")
    parser.add_argument("--keep", type=Path, help="folder that keeps logs and records")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"chaos: seed {seed}", flush=True)
    if options.keep is None:
        with tempfile.TemporaryDirectory(prefix="promptq-chaos-") as folder:
            outcome = asyncio.run(Run(seed, options.seconds, Path(folder), options.load).run())
    else:
        options.keep.mkdir(parents=True, exist_ok=False)
        outcome = asyncio.run(Run(seed, options.seconds, options.keep, options.load).run())
    print(report(outcome))
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
