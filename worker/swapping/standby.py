"""The side of a process that serves one of several models: it loads when it is told to."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import redis.asyncio
from redis.exceptions import NoPermissionError

from promptq.shared.protocol.claims import Room
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.build import fits_beside_others, identify

if TYPE_CHECKING:
    from promptq.worker.engine.load_check.checked_model import Verdict


class Told(StrEnum):
    """What the owner tells a process."""

    LOAD = "load"
    """Load once the model fits beside what is in memory."""
    LOAD_ALONE = "load alone"
    """Load now: no other model is in memory."""
    DRAIN = "drain"
    STOP = "stop"
    """End without waiting for what runs."""


class Tells(StrEnum):
    """What a process tells its owner."""

    REGISTERED = "registered"
    NO_ROOM = "no room"
    """The model does not fit beside what is in memory."""
    SERVING = "serving"
    """What follows says what serves."""
    FAILED = "failed"
    """What follows is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Known:
    """What an earlier process found out about the model of this fingerprint."""

    fingerprint: str
    verdict: bytes
    """Pickled, as the owner has not imported what it is made of."""


class Standby:
    """Waits until it is this model's turn. The end of the owner counts as a request to drain."""

    def __init__(self, owner: Connection) -> None:
        self._owner = owner
        self._loads = asyncio.Event()
        self._is_alone = asyncio.Event()
        self._known: Known | None = None
        self._fingerprint = ""

    def listen(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        """Heed the owner from now on, in the running event loop."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                told, known = self._owner.recv()
                self._known = known or self._known
            except (EOFError, OSError):
                loop.remove_reader(self._owner.fileno())
                told = Told.DRAIN
            if told is Told.LOAD_ALONE:
                self._is_alone.set()
            if told in (Told.LOAD, Told.LOAD_ALONE):
                self._loads.set()
            else:
                (stop if told is Told.DRAIN else stop_now).set()
                stop.set()

        loop.add_reader(self._owner.fileno(), read)

    async def wait(self, settings: WorkerSettings, client: redis.asyncio.Redis) -> Verdict | None:
        """Register the model with its queue, so that clients find it, and wait for its turn.

        Gives the verdict of an earlier load, if the files are still those. Raises
        ModelNotFoundError, and ModelMismatchError if the queue has another model.
        """
        identity = await asyncio.to_thread(identify, settings)
        queue = AsyncRequestQueue(client, settings.queue, model=identity)
        await queue.take_batch(Room(max_count=0, token_budget=0))
        with suppress(NoPermissionError):  # the worker warns of it once its model is loaded
            await queue.run(lookups.note_queue(settings.queue))
        self.tell(Tells.REGISTERED)
        await self._loads.wait()
        is_alone = self._is_alone.is_set()
        if not is_alone and not await asyncio.to_thread(fits_beside_others, settings):
            self.tell(Tells.NO_ROOM)
            await self._is_alone.wait()
        self._fingerprint = identity.fingerprint
        if self._known is None or self._known.fingerprint != identity.fingerprint:
            return None
        verdict: Verdict = pickle.loads(self._known.verdict)  # noqa: S301 # of the same program
        return verdict

    def serving(self, line: str, verdict: Verdict | None) -> None:
        """Tell the owner that requests are claimed from now on; `line` says by what."""
        known = None if verdict is None else Known(self._fingerprint, pickle.dumps(verdict))
        self.tell(Tells.SERVING, line, known)

    def tell(self, what: Tells, text: str = "", known: Known | None = None) -> None:
        """Tell the owner, if it still lives."""
        with suppress(OSError):
            self._owner.send((what, text, known))
