"""Measures whether memory and latency stay flat under steady load."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.programs.soak.soaking import report, soak
from tests.support.processes import hear_signals


def main() -> int:
    """Exit code 1 if something grows, or an answer was not whole."""
    hear_signals()
    parser = argparse.ArgumentParser(prog="python -m tests soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--faster", type=float, default=1.0, help="so many times as many requests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="promptq-soak-") as folder:
        samples = asyncio.run(soak(options.seconds, Path(folder), options.faster))
    table, is_well = report(samples)
    print(table)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
