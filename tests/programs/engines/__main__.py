"""Puts real inference servers behind workers, and kills both.

Their environments are built first, as by `python -m benchmarks peers`.
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
_KILLS = {"stand-in": 200, "llama.cpp": 15, "vllm": 5}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests engines", description=__doc__)
    parser.add_argument("options", nargs="*", help="options of pytest, after --")
    options = parser.parse_args()
    _run("benchmarks", "peers")
    _run(*_TESTS, *options.options)
    for kind, kills in _KILLS.items():
        count = str(kills)
        _run("tests.programs.engines.chaos", kind, "--worker-kills", count, "--server-kills", count)


def _run(*command: str) -> None:
    environment = {**os.environ, "PROMPTQ_TEST_ENGINES": "1"}
    subprocess.run([sys.executable, "-m", *command], env=environment, check=True)


if __name__ == "__main__":
    main()
