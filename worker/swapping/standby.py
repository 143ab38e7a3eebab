"""Runs in one model's process, and waits until the owner (the parent process) orders a load."""

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
from promptq.worker.serve.build import fits_beside_others
from promptq.worker.serve.model_identity import identify

if TYPE_CHECKING:
    from promptq.worker.engine.load_check.checked_model import Verdict


class Order(StrEnum):
    """An order that the owner sends to a process."""

    LOAD = "load"
    """Load the model as soon as it fits into memory beside the loaded models."""
    LOAD_ALONE = "load alone"
    """Load the model now. No other model is in memory."""
    DRAIN = "drain"
    STOP = "stop"
    """End without waiting for running requests."""


class Report(StrEnum):
    """A report of a process to its owner, perhaps with a text."""

    REGISTERED = "registered"
    NO_ROOM = "no room"
    """The model does not fit into memory beside the loaded models."""
    SERVING = "serving"
    """The process claims requests. The text describes the worker for the log."""
    FAILED = "failed"
    """The process ends after an error. The text is a sentence with the reason."""


@dataclass(frozen=True, slots=True)
class Known:
    """The result of an earlier test of a model, valid while the files have this fingerprint."""

    fingerprint: str
    verdict: bytes
    """The pickled `Verdict`. The owner never unpickles it, because the owner lacks that class."""


class Standby:
    """Waits until the owner (the process that started this one) orders this model to be loaded. If
    the owner ends, this process drains: it finishes running requests and ends."""

    def __init__(self, owner: Connection) -> None:
        self._owner = owner
        self._loads = asyncio.Event()
        self._is_alone = asyncio.Event()
        self._known: Known | None = None
        self._fingerprint = ""

    def listen(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        """Act on the owner's orders from now on, in the running event loop. An order to drain sets
        `stop`. An order to stop sets both events, so that the process ends without waiting."""
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

    async def wait(self, settings: WorkerSettings, client: redis.asyncio.Redis) -> Verdict | None:
        """Register the model with its queue, where clients find it. Wait for the order to load.

        Returns the test result of an earlier load if the files have not changed, otherwise None.
        Raises ModelError, RedisError. Raises ModelMismatchError if the queue has another model.
        """
        identity = await asyncio.to_thread(identify, settings)
        queue = AsyncRequestQueue(client, settings.queue, model=identity)
        await queue.take_batch(Room(max_count=0, token_budget=0))
        with suppress(NoPermissionError):  # once the model is loaded, the worker logs a warning
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
        """Report that the process claims requests from now on. `line` is for the log."""
        known = None if verdict is None else Known(self._fingerprint, pickle.dumps(verdict))
        self.report(Report.SERVING, line, known)

    def report(self, what: Report, text: str = "", known: Known | None = None) -> None:
        """Send a report to the owner, if the owner still runs."""
        with suppress(OSError):
            self._owner.send((what, text, known))
