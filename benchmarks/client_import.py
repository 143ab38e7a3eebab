"""Measures what `from promptq import Client` costs, compared with redis-py alone.

Each figure is the median over fresh interpreters, minus the median of interpreters that import
nothing. The programs run in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

PROGRAMS = {"nothing": "", "redis-py": "import redis", "promptq": "from promptq import Client"}


def cpu_ms(program: str) -> float:
    """Returns the CPU milliseconds of an interpreter from its start to its end."""
    process = subprocess.Popen([sys.executable, "-P", "-c", program])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{program!r} failed")
    return 1000 * (used.ru_utime + used.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks import", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds + 1):
        for name, program in PROGRAMS.items():
            taken[name].append(cpu_ms(program))
    # The first round read files that were in no cache.
    medians = {name: statistics.median(values[1:]) for name, values in taken.items()}
    for name in ("redis-py", "promptq"):
        print(f"{name}: {medians[name] - medians['nothing']:.0f} ms of CPU")


if __name__ == "__main__":
    main()
