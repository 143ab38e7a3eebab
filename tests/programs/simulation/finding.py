"""Counts how many worlds have to run until a promise is broken, for each mutant."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from tests.programs.simulation import clock
from tests.programs.simulation.mutants import ALL_MUTANTS

_LONGEST_SECONDS = 20
"""Seconds of CPU after which a world has stopped for ever. The longest takes 5."""
_IMPORTED_ONCE = ("hiredis", "numpy", "pydantic", "redis.asyncio", "structlog")


class HangError(KeyboardInterrupt):
    """Raised in a world that never ends. asyncio does not catch a KeyboardInterrupt."""


@dataclass(frozen=True, slots=True)
class Found:
    """How a mutant was found. `rules` has the broken promises; empty if no world has found the
    mutant."""

    name: str
    num_seeds: int
    rules: Sequence[str]

    def __str__(self) -> str:
        how = ", ".join(self.rules) if self.rules else "**not found**"
        return f"| {self.name} | {self.num_seeds} | {how} |"


def find_all(
    names: Iterable[str],
    seeds: Sequence[int],
    most_requests: int | None,
    server_kind: str,
    num_processes: int,
) -> Iterator[Found]:
    """Run worlds of these seeds with each mutant. Yields how each mutant was found, the quickest
    first."""
    clock.install()
    for name in _IMPORTED_ONCE:
        import_module(name)
    find = partial(_find, seeds=seeds, most_requests=most_requests, server_kind=server_kind)
    with get_context("fork").Pool(num_processes, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(find, names)


def _find(name: str, seeds: Sequence[int], most_requests: int | None, server_kind: str) -> Found:
    """Runs worlds until one breaks a promise. This process must not have imported promptq."""
    ALL_MUTANTS[name].install()
    from tests.programs.simulation.__main__ import send_logs_to_story
    from tests.programs.simulation.plan import Plan
    from tests.programs.simulation.server import compile_library
    from tests.programs.simulation.world import run_world

    send_logs_to_story(is_told=False)
    signal.signal(signal.SIGPROF, _stop)
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder))
        for number, seed in enumerate(seeds, 1):
            signal.setitimer(signal.ITIMER_PROF, _LONGEST_SECONDS)
            try:
                plan = Plan.of(seed, most_requests)
                violations = run_world(plan, library, server_kind=server_kind).violations
            except HangError:
                return Found(name, number, ["hangs"])
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            if violations:
                rules = dict.fromkeys(violation.rule for violation in violations)
                return Found(name, number, list(rules))
    return Found(name, len(seeds), [])


def _stop(_number: int, _frame: object) -> None:
    raise HangError
