"""Checks that take longer than `make test`, or need more than it has: `python -m tests NAME`."""

from __future__ import annotations

import sys

from tests.program_list import Program, run

PROGRAMS = {
    "package": Program("tests.package"),
    "redis-py": Program("tests.package.redis_py"),
    "states": Program("tests.shared.states"),
    "fuzz": Program("tests.fuzz"),
    "chaos": Program("tests.chaos"),
    "update": Program(
        "tests.chaos",
        arguments=("--beside-last-release", "--seconds", "600"),
        sentence="Updates a fleet from the last release and back, under the faults of chaos.",
    ),
    "swapping": Program("tests.worker.swapping.chaos"),
    "soak": Program("tests.soak"),
    "engines": Program("tests.engines"),
    "compat": Program("tests.compat"),
    "scoring": Program("tests.scoring"),
    "sanitizers": Program("tests.worker.engine.native.sanitizers"),
    "images": Program("tests.deploy.images"),
    "changes": Program("tests.docs.changes"),
    "snippets": Program("tests.docs.snippets"),
}

if __name__ == "__main__":
    sys.exit(run("python -m tests", PROGRAMS))
