"""Places in a world. Each place runs one program at a time. Faults end, freeze and restart
programs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from tests.programs.simulation.loop import Process, SimulatedLoop
from tests.programs.simulation.network import Network
from tests.programs.simulation.notes import Notes
from tests.programs.simulation.trace import Trace


class Program(Protocol):
    """A program in a simulated process."""

    process: Process
    main: asyncio.Task[None]

    def drain(self) -> None:
        """Order the program to end, as SIGTERM does."""


P = TypeVar("P", bound=Program)


class Site:
    """The parts of a world that all its places share."""

    def __init__(self, seed: int, loop: SimulatedLoop, network: Network, trace: Trace) -> None:
        self.seed = seed
        self.loop = loop
        self.network = network
        self.trace = trace
        self.notes = Notes()
        self.is_over = False
        """Whether the world is over, so nothing starts."""


class Place(Generic[P]):
    """A place that runs one program at a time, and starts the program again after its end, unless
    `ends_once`.

    `make` starts a program in a new process. `on_end` is called with a program that ended by
    itself, and with the program's error.
    """

    def __init__(
        self,
        site: Site,
        name: str,
        make: Callable[[Process, random.Random], P],
        on_end: Callable[[P, BaseException | None], None],
        *,
        ends_once: bool = False,
    ) -> None:
        self.program: P | None = None
        self.programs: list[P] = []
        """All programs so far."""
        self.make_random = random.Random
        """Makes the random numbers of a program from a seed."""
        self._site = site
        self._name = name
        self._make = make
        self._on_end = on_end
        self._ends_once = ends_once
        self._watching: asyncio.Task[None]

    def start(self) -> None:
        name = f"{self._name}.{len(self.programs) + 1}"
        rng = self.make_random(f"{self._site.seed} {name}")
        process = Process(self._site.loop, name, _clock_rate(rng))
        self._site.trace.note(process, "starts")
        self.program = self._make(process, rng)
        self.programs.append(self.program)
        self._watching = self._site.loop.root.start(self._watch(self.program))

    async def until_over(self) -> None:
        """Wait until no program runs or will start here."""
        while not self._watching.done():
            await asyncio.wait([self._watching])

    def drain(self) -> None:
        if self.program is not None:
            self.program.drain()

    def kill(self, seconds: float) -> None:
        """Kill the program. Another one starts after `seconds`."""
        program, self.program = self.program, None
        if program is None:  # it has not come back yet
            return
        self._site.trace.note(program.process, "is killed")
        self._watching.cancel()
        self._bury(program)

        async def come_back() -> None:
            await asyncio.sleep(seconds)
            if not self._site.is_over:
                self.start()

        self._watching = self._site.loop.root.start(come_back())

    async def _watch(self, program: P) -> None:
        """Wait for the end of a program, and start another one."""
        with suppress(Exception):
            await asyncio.wait([program.main])
        error = program.main.exception()
        self._site.trace.note(program.process, f"ends with {error!r}" if error else "ends")
        self._on_end(program, error)
        self._bury(program)
        self.program = None
        if not self._site.is_over and not self._ends_once:
            self.start()

    def _bury(self, program: P) -> None:
        program.process.kill()
        self._site.network.bury(program.process)


def running(places: Iterable[Place[Any]]) -> list[Process]:
    """Returns the processes of the programs that run now."""
    return [place.program.process for place in places if place.program is not None]


def _clock_rate(rng: random.Random) -> float:
    return 1 + rng.choice([0.0, 0.0001, 0.01]) * (rng.random() - 0.5)
