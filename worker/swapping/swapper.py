"""Lets several models take turns on one device, as the work in their queues requires."""

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
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0  # after a failure


class ModelFailedError(PromptqError):
    """Raised if a model cannot be served at all. The message has the reason."""


@dataclass
class _Model:
    """A model's process, and facts about its earlier processes. Times are of `time.monotonic()`."""

    process: ModelProcess
    left_at: float = -math.inf
    """When the model was last unloaded."""
    worked_at: float = -math.inf
    """The later of two times: when the model was last loaded, and when it last had work then."""
    load_seconds: float = _GUESSED_LOAD_SECONDS
    pause: float = 0.0
    """Seconds of the last pause after a failure; 0 if the last load succeeded."""
    not_before: float = 0.0
    """After a failure, no process loads the model before this time."""


class Swapper:
    """Keeps one model loaded. Each other model has a process that is ready to load it.

    `start` starts the process of a queue. With `overlaps`, a model may be loaded while the previous
    model still runs, if there is memory for both. The function `choose` decides which model should
    be loaded. Each next step follows from that choice and from the states of the processes.
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
        self._models = {name: _Model(start(name, None)) for name in queues}
        self._works: dict[str, Work] = {}
        self._wanted: str | None = next(iter(queues))
        self._changed_at = self._loaded_at = time.monotonic()
        self._has_started = self._is_leaving = False
        self._log = get_logger()

    @property
    def health(self) -> Health:
        """The health of this process, which starts the models' processes. `is_claiming` is True
        until `drain` begins."""
        return Health(has_started=self._has_started, is_claiming=not self._is_leaving)

    async def start(self, stop: asyncio.Event) -> None:
        """Wait until all models are registered and the first model serves, or until `stop` is set.
        Raises ModelFailedError if a model cannot be served."""
        while not stop.is_set() and not self._has_started:
            self._look()
            for name, model in self._models.items():
                if model.process.state is ProcessState.ENDED:
                    why = model.process.failure or f"it ended with {model.process.exit_code}"
                    raise ModelFailedError(f"{self._described(name)}: {why}")
            states = {model.process.state for model in self._models.values()}
            if ProcessState.STARTING not in states:
                self._arrange()
                self._has_started = ProcessState.SERVING in states
            await asyncio.sleep(_LOOK_SECONDS)

    async def run(self, stop: asyncio.Event) -> None:
        """Change the loaded model as the work in the queues requires, until `stop` is set."""
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
        """Order all processes to finish running requests and end. If `stop_now` is set, order them
        to give these requests back. Returns when all have ended, or after `seconds`."""
        self._is_leaving = True
        notify("STOPPING=1")
        for model in self._models.values():
            model.process.drain()
        deadline, is_stopped = time.monotonic() + seconds, False
        while time.monotonic() < deadline:
            self._look()
            if {model.process.state for model in self._models.values()} == {ProcessState.ENDED}:
                return
            if stop_now.is_set() and not is_stopped:
                is_stopped = True
                for model in self._models.values():
                    model.process.stop()
            await asyncio.sleep(_LOOK_SECONDS)

    def kill(self) -> None:
        for model in self._models.values():
            model.process.kill()

    def _look(self) -> None:
        now = time.monotonic()
        for model in self._models.values():
            before, after = model.process.state, model.process.look()
            if before is not ProcessState.SERVING and after is ProcessState.SERVING:
                model.load_seconds, model.pause = now - self._changed_at, 0.0
                model.worked_at = self._loaded_at = now
                self._log.info("a model is loaded", ready=model.process.served)
            if before is ProcessState.SERVING and after is ProcessState.ENDED:
                model.left_at = now

    def _replace_ended(self) -> None:
        # After a failure, a process starts again only when a pause is over.
        now = time.monotonic()
        for name, model in self._models.items():
            if model.process.state is not ProcessState.ENDED or now < model.not_before:
                continue
            exit_code, why = model.process.exit_code, model.process.failure
            if exit_code and model.not_before == 0.0:
                model.pause = min(2 * model.pause or _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
                self._log.error(
                    "a model's process ended",
                    model=self._described(name),
                    error=why or f"exit code {exit_code}",
                    tried_again_after_seconds=model.pause,
                )
                model.not_before = now + model.pause
                continue
            model.not_before = 0.0
            model.process.kill()
            model.process = self._start(name, model.process.known)

    def _decide(self) -> None:
        # Does nothing while the queues' work is unknown, or while a change of models is under way.
        now, own, loaded = time.monotonic(), Work(), None
        if not self._works:
            return
        if self._wanted is not None:
            model = self._models[self._wanted]
            own = self._works[self._wanted]
            if model.process.state is ProcessState.SERVING:
                if own.num_waiting or own.num_active:
                    model.worked_at = now
                loaded = Loaded(self._wanted, self._loaded_at, model.worked_at)
            elif model.process.state is not ProcessState.ENDED:
                return
        candidates = {
            name: Candidate(self._works[name], model.left_at, model.load_seconds)
            for name, model in self._models.items()
            if model.not_before <= now and (loaded is None or name != loaded.queue)
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
        now = time.monotonic()
        names = [name for name, model in self._models.items() if model.not_before <= now]
        with suppress(ResponseError):  # such as a full server; swapping continues
            until_ms = await self._queue.run(lookups.server_time_ms()) + _LOADABLE_FOR_MS
            await self._queue.run([scripts.stand_by(Keys(name), until_ms) for name in names])

    def _described(self, name: str | None) -> str:
        return f"{self._names[name]} (queue {name})" if name else "none"

    def _arrange(self) -> None:
        # Each call takes one step towards a state in which only the wanted process serves.
        wanted = self._models[self._wanted].process if self._wanted else None
        others = [model for model in self._models.values() if model.process is not wanted]
        is_alone = not any(model.process.holds_memory for model in others)
        state = wanted.state if wanted else None
        if wanted and state is ProcessState.STANDBY and (is_alone or self._overlaps):
            wanted.load(is_alone=is_alone)
        has_no_room = wanted is not None and not wanted.has_room
        if wanted and has_no_room and is_alone:
            wanted.load(is_alone=True)
        stays_alone = state in (None, ProcessState.SERVING) or has_no_room
        if stays_alone or (state is ProcessState.STANDBY and not self._overlaps):
            for model in others:
                if model.process.state is ProcessState.SERVING:
                    model.left_at = time.monotonic()
                    model.process.drain()

    async def _read_on(self) -> None:
        names = [*self._models]
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
