"""Checks that take longer than `make test`, or need more than it has: `python -m tests NAME`."""

from __future__ import annotations

import sys

from tests.support.program_list import Program, run

PROGRAMS = {
    "package": Program("tests.programs.package.strangers"),
    "redis-py": Program("tests.programs.package.redis_py"),
    "states": Program("tests.programs.states.explore"),
    "fuzz": Program("tests.programs.fuzz.fuzzing"),
    "chaos": Program("tests.programs.chaos"),
    "update": Program(
        "tests.programs.chaos",
        arguments=("--beside-last-release", "--seconds", "600"),
        sentence="Updates a fleet from the last release and back, under the faults of chaos.",
    ),
    "swapping": Program(
        "tests.programs.chaos",
        arguments=("--scenario", "swapping"),
        sentence="Kills processes while two models take turns on one device.",
    ),
    "failover": Program("tests.programs.failover"),
    "simulate": Program("tests.programs.simulation"),
    "soak": Program("tests.programs.soak.soaking"),
    "engines": Program("tests.programs.engines"),
    "compat": Program("tests.programs.compat"),
    "scoring": Program("tests.programs.scoring"),
    "sanitizers": Program("tests.worker.engine.native.sanitizers"),
    "images": Program("tests.deploy.images"),
    "changes": Program("tests.docs.changes"),
    "snippets": Program("tests.docs.snippets"),
}

if __name__ == "__main__":
    sys.exit(run("python -m tests", PROGRAMS))
