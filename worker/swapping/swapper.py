"""Lets several models take turns on one device. The work in their queues decides the turns."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from redis.exceptions import ResponseError

from promptq.shared.errors import PromptqError
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue import lookups, scripts
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.queue.statistics import Work, measure_work
from promptq.shared.runtime.logs import get_logger
from promptq.worker.health.probes import Health
from promptq.worker.health.systemd import notify
from promptq.worker.swapping.model_choice import Candidate, Loaded, SwapTimes, choose
from promptq.worker.swapping.model_process import ModelProcess, ProcessState
from promptq.worker.swapping.standby import Known

_LOOK_SECONDS = 0.02
_READ_SECONDS = 0.2
_REPORT_SECONDS = 1.0
_LOADABLE_FOR_MS = 5000
_GUESSED_LOAD_SECONDS = 10.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_MOST_DOUBLINGS = 10
"""The wait after a failure doubles at most this often. Without the limit, the number would be too
large for a float after a day of failures."""


class ModelFailedError(PromptqError):
    """Raised if a model cannot be served at all. The message has the reason."""


@dataclass
class _Place:
    """The present process of one model, and facts about its earlier processes."""

    process: ModelProcess
    left_at: float = float("-inf")
    worked_at: float = float("-inf")
    load_seconds: float = _GUESSED_LOAD_SECONDS
    num_failures: int = 0
    not_before: float = 0.0
    """After a failure, no process loads the model before this time, in seconds of
    `time.monotonic()`."""


class Swapper:
    """Keeps one model loaded, and the processes of the other models ready to load theirs.

    `start` starts the process of a queue. With `overlaps`, a model may be loaded while the previous
    one still runs, if there is memory for both. The function `choose` decides which model should be
    loaded. Each next step follows from that choice and from the states of the processes.
    """

    def __init__(
        self,
        queues: Mapping[str, str],
        start: Callable[[str, Known | None], ModelProcess],
        queue: AsyncRequestQueue,
        times: SwapTimes,
        *,
        overlaps: bool = True,
    ) -> None:
        """`queues` maps each queue to the name of its model."""
        self._names = queues
        self._start = start
        self._queue = queue
        self._times = times
        self._overlaps = overlaps
        self._places = {name: _Place(start(name, None)) for name in queues}
        self._works: dict[str, Work] = {}
        self._wanted: str | None = next(iter(queues))
        self._changed_at = self._loaded_at = time.monotonic()
        self._has_started = self._is_leaving = False
        self._log = get_logger()

    @property
    def health(self) -> Health:
        """The health of this process, which owns the processes of the models. `is_claiming` is true
        while models can be loaded, even if none is loaded."""
        return Health(has_started=self._has_started, is_claiming=not self._is_leaving)

    async def start(self, stop: asyncio.Event) -> None:
        """Wait until each model is found and the first one serves, or until `stop`.

        Raises ModelFailedError if a model cannot be served.
        """
        while not stop.is_set() and not self._has_started:
            self._look()
            for name, place in self._places.items():
                if place.process.state is ProcessState.ENDED:
                    why = place.process.failure or f"it ended with {place.process.exit_code}"
                    raise ModelFailedError(f"{self._described(name)}: {why}")
            states = {place.process.state for place in self._places.values()}
            if ProcessState.STARTING not in states:
                self._arrange()
                self._has_started = ProcessState.SERVING in states
            await asyncio.sleep(_LOOK_SECONDS)

    async def run(self, stop: asyncio.Event) -> None:
        """Change the loaded model as the queues' work requires, until `stop`."""
        reading = asyncio.create_task(self._read_on())
        try:
            while not stop.is_set():
                self._look()
                self._replace_ended()
                self._decide()
                self._arrange()
                await asyncio.sleep(_LOOK_SECONDS)
                if reading.done():
                    reading.result()
        finally:
            reading.cancel()

    async def drain(self, stop_now: asyncio.Event, seconds: float) -> None:
        """Let running requests finish for up to `seconds`, and end all processes."""
        self._is_leaving = True
        notify("STOPPING=1")
        for place in self._places.values():
            place.process.drain()
        deadline, is_stopped = time.monotonic() + seconds, False
        while time.monotonic() < deadline:
            self._look()
            if {place.process.state for place in self._places.values()} == {ProcessState.ENDED}:
                return
            if stop_now.is_set() and not is_stopped:
                is_stopped = True
                for place in self._places.values():
                    place.process.stop()
            await asyncio.sleep(_LOOK_SECONDS)

    def kill(self) -> None:
        """Kill all processes."""
        for place in self._places.values():
            place.process.kill()

    def _look(self) -> None:
        now = time.monotonic()
        for place in self._places.values():
            before, after = place.process.state, place.process.look()
            if before is not ProcessState.SERVING and after is ProcessState.SERVING:
                place.load_seconds, place.num_failures = now - self._changed_at, 0
                place.worked_at = self._loaded_at = now
                self._log.info("a model is loaded", ready=place.process.served)
            if before is ProcessState.SERVING and after is ProcessState.ENDED:
                place.left_at = now

    def _replace_ended(self) -> None:
        """Start a new process for each one that has ended. After a failure, this waits until a
        pause is over."""
        now = time.monotonic()
        for name, place in self._places.items():
            if place.process.state is not ProcessState.ENDED or now < place.not_before:
                continue
            exit_code, why = place.process.exit_code, place.process.failure
            if exit_code and place.not_before == 0.0:
                place.num_failures += 1
                doublings = min(place.num_failures - 1, _MOST_DOUBLINGS)
                pause = min(_FIRST_PAUSE_SECONDS * 2**doublings, _LONGEST_PAUSE_SECONDS)
                self._log.error(
                    "a model's process ended",
                    model=self._described(name),
                    error=why or f"exit code {exit_code}",
                    tried_again_after_seconds=pause,
                )
                place.not_before = now + pause
                continue
            place.not_before = 0.0
            place.process.kill()
            place.process = self._start(name, place.process.known)

    def _decide(self) -> None:
        """Choose the model to load. Does nothing while the queues' work is unknown, or while a
        change of models is in progress."""
        now, own, loaded = time.monotonic(), Work(), None
        if not self._works:
            return
        if self._wanted is not None:
            place = self._places[self._wanted]
            own = self._works[self._wanted]
            if place.process.state is ProcessState.SERVING:
                if own.num_waiting or own.num_active:
                    place.worked_at = now
                loaded = Loaded(self._wanted, self._loaded_at, place.worked_at)
            elif place.process.state is not ProcessState.ENDED:
                return
        candidates = {
            name: Candidate(self._works[name], place.left_at, place.load_seconds)
            for name, place in self._places.items()
            if place.not_before <= now and (loaded is None or name != loaded.queue)
        }
        choice = choose(self._times, loaded, own, candidates, now)
        if choice is not None and choice.queue != self._wanted:
            self._log.info(
                "another model",
                loads=self._described(choice.queue),
                in_place_of=self._described(self._wanted),
                because=choice.because,
            )
            self._wanted, self._changed_at = choice.queue, now

    async def _report_loadable(self) -> None:
        """Report to the server the queues whose models are loaded or can be loaded."""
        now = time.monotonic()
        names = [name for name, place in self._places.items() if place.not_before <= now]
        with suppress(ResponseError):  # such as a full server; swapping continues
            until_ms = await self._queue.run(lookups.server_time_ms()) + _LOADABLE_FOR_MS
            await self._queue.run([scripts.stand_by(Keys(name), until_ms) for name in names])

    def _described(self, name: str | None) -> str:
        return f"{self._names[name]} (queue {name})" if name else "none"

    def _arrange(self) -> None:
        """Start the next steps towards a state in which only the wanted process serves."""
        wanted = self._places[self._wanted].process if self._wanted else None
        others = [place for place in self._places.values() if place.process is not wanted]
        is_alone = not any(place.process.holds_memory for place in others)
        state = wanted.state if wanted else None
        if wanted and state is ProcessState.STANDBY and (is_alone or self._overlaps):
            wanted.load(is_alone=is_alone)
        has_no_room = wanted is not None and not wanted.has_room
        if wanted and has_no_room and is_alone:
            wanted.load(is_alone=True)
        stays_alone = state in (None, ProcessState.SERVING) or has_no_room
        if stays_alone or (state is ProcessState.STANDBY and not self._overlaps):
            for place in others:
                if place.process.state is ProcessState.SERVING:
                    place.left_at = time.monotonic()
                    place.process.drain()

    async def _read_on(self) -> None:
        """Read the work of all queues repeatedly, and report which models can be loaded."""
        names = [*self._places]
        is_away, reported_at = False, -math.inf
        while True:
            try:
                read = await self._queue.run([measure_work(Keys(name)) for name in names])
                self._works = dict(zip(names, read, strict=True))
                if time.monotonic() >= reported_at + _REPORT_SECONDS:
                    reported_at = time.monotonic()
                    await self._report_loadable()
                is_away = False
            except Exception as error:  # a bad entry in Redis must not end the swapping
                if not is_away:
                    self._log.warning(
                        "the queues cannot be read, so no model is swapped", error=str(error)
                    )
                is_away, self._works = True, {}
            await asyncio.sleep(_READ_SECONDS)
