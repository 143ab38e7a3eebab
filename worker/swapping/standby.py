"""The process' side of taking turns: it loads its model when its owner orders it."""

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
from promptq.shared.settings.common import Settings
from promptq.worker.serve.build import fits_beside_others, identify

if TYPE_CHECKING:
    from promptq.worker.engine.load_check.checked_model import Verdict


class Order(StrEnum):
    """An order of the owner to a process."""

    LOAD = "load"
    """Load once the model fits beside what is in memory."""
    LOAD_ALONE = "load alone"
    """Load now: no other model is in memory."""
    DRAIN = "drain"
    STOP = "stop"
    """End without waiting for running requests."""


class Report(StrEnum):
    """A report of a process to its owner."""

    REGISTERED = "registered"
    NO_ROOM = "no room"
    """The model does not fit beside what is in memory."""
    SERVING = "serving"
    """The text is the ready line."""
    FAILED = "failed"
    """The text is a sentence with the reason."""


@dataclass(frozen=True, slots=True)
class Known:
    """The verdict of an earlier process on the model with this fingerprint."""

    fingerprint: str
    verdict: bytes
    """Pickled, because the owner has not imported its classes."""


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
                order, known = self._owner.recv()
                self._known = known or self._known
            except (EOFError, OSError):
                loop.remove_reader(self._owner.fileno())
                order = Order.DRAIN
            if order is Order.LOAD_ALONE:
                self._is_alone.set()
            if order in (Order.LOAD, Order.LOAD_ALONE):
                self._loads.set()
            else:
                (stop if order is Order.DRAIN else stop_now).set()
                stop.set()

        loop.add_reader(self._owner.fileno(), read)

    async def wait(self, settings: Settings, client: redis.asyncio.Redis) -> Verdict | None:
        """Register the model with its queue, so that clients find it, and wait for its turn.

        Returns the verdict of an earlier load, if the files have not changed. Raises
        ModelNotFoundError, and ModelMismatchError if the queue has another model.
        """
        identity = await asyncio.to_thread(identify, settings)
        queue = AsyncRequestQueue(client, settings.queue, model=identity)
        await queue.take_batch(Room(max_count=0, token_budget=0))
        with suppress(NoPermissionError):  # the worker warns of it once its model is loaded
            await queue.run(lookups.note_queue(settings.queue))
        self.report(Report.REGISTERED)
        await self._loads.wait()
        is_alone = self._is_alone.is_set()
        if not is_alone and not await asyncio.to_thread(fits_beside_others, settings):
            self.report(Report.NO_ROOM)
            await self._is_alone.wait()
        self._fingerprint = identity.fingerprint
        if self._known is None or self._known.fingerprint != identity.fingerprint:
            return None
        verdict: Verdict = pickle.loads(self._known.verdict)  # noqa: S301 # of the same program
        return verdict

    def serving(self, line: str, verdict: Verdict | None) -> None:
        """Report to the owner that this worker now claims requests; `line` is its ready line."""
        known = None if verdict is None else Known(self._fingerprint, pickle.dumps(verdict))
        self.report(Report.SERVING, line, known)

    def report(self, what: Report, text: str = "", known: Known | None = None) -> None:
        """Report to the owner, if it still lives."""
        with suppress(OSError):
            self._owner.send((what, text, known))
