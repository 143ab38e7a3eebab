"""Processes that tests start react to signals that the tests' own process ignores."""

from __future__ import annotations

import sys

import pytest

from tests.support.processes import running

STARTED_BY_A_TEST = """
import sys
from tests.support.processes import start
sys.exit(-start("sh", "-c", sys.argv[1]).wait())
"""
STARTED_BY_CHAOS = """
import asyncio, sys
from tests.programs.chaos.processes.group import ProcessGroup

async def main():
    group = ProcessGroup()
    await group.start()
    process = await group.spawn("sh", "-c", sys.argv[1])
    ended = -await process.wait()
    await group.end()
    return ended

sys.exit(asyncio.run(main()))
"""


@pytest.mark.parametrize(("name", "number"), [("INT", 2), ("TERM", 15)])
@pytest.mark.parametrize("program", [STARTED_BY_A_TEST, STARTED_BY_CHAOS], ids=["test", "chaos"])
def test_a_child_hears_what_its_parent_was_started_to_ignore(
    program: str, name: str, number: int
) -> None:
    """A shell has the tests ignore signals if it starts them in the background."""
    ignoring = ["sh", "-c", f'trap "" {name}; exec "$@"', "sh"]
    to_itself = f"kill -{name} $$; exit 0"
    with running(*ignoring, sys.executable, "-c", program, to_itself) as process:
        assert process.wait() == number
