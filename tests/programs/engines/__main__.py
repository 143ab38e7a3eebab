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
    "llama.cpp": (200, 0.07),
    "vllm": (600, 0.025),
    "sglang": (600, 0.025),
}
"""Seconds of faults, and the load. Real servers get 200 requests or more under schemas and forced
tools, more than 20 kills of workers, and 10 of servers, which take up to 45 s to start."""


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
