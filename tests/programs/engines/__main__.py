"""Puts real inference servers behind workers, and kills both.

First builds the servers' environments, as `python -m benchmarks peers` does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

_TESTS = [
    "pytest",
    "-n",
    "0",
    "tests/programs/engines",
    "tests/worker/serve/test_engine_contract.py",
]
_RUNS = {
    "stand-in": (1200, 1.0),
    "llama.cpp": (100, 0.2),
    "vllm": (40, 0.2),
    "sglang": (40, 0.2),
}
"""Seconds of faults, with a kill of a server and of a worker every 5 s on average, and the load."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests engines", description=__doc__)
    parser.add_argument("options", nargs="*", help="options of pytest, after --")
    options = parser.parse_args()
    _run("benchmarks", "peers")
    _run(*_TESTS, *options.options)
    for kind, (seconds, load) in _RUNS.items():
        how = ("--engine", kind, "--seconds", str(seconds), "--load", str(load))
        _run("tests.programs.chaos", "--scenario", "engines", *how)


def _run(*command: str) -> None:
    environment = {**os.environ, "PROMPTQ_TEST_ENGINES": "1"}
    subprocess.run([sys.executable, "-m", *command], env=environment, check=True)


if __name__ == "__main__":
    main()
