"""The side of a process that serves one of several models: it loads when it is told to."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import StrEnum
from multiprocessing.connection import Connection

import redis.asyncio

from promptq.shared.protocol.claims import Room
from promptq.shared.queue import directory
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.settings import Settings
from promptq.worker.served_model import fits_beside_others, identify


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


class Standby:
    """Waits until it is this model's turn. The end of the owner counts as a request to drain."""

    def __init__(self, owner: Connection) -> None:
        self._owner = owner
        self._loads = asyncio.Event()
        self._is_alone = asyncio.Event()

    def listen(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        """Heed the owner from now on, in the running event loop."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                told = Told(self._owner.recv())
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

    async def wait(self, settings: Settings, client: redis.asyncio.Redis) -> None:
        """Register the model with its queue, so that clients find it, and wait for its turn.

        Raises ModelNotFoundError, and ModelMismatchError if the queue has another model.
        """
        identity = await asyncio.to_thread(identify, settings)
        queue = AsyncRequestQueue(client, settings.queue, model=identity)
        await queue.take_batch(Room(max_count=0, token_budget=0))
        await queue.run(directory.note_queue(settings.queue))
        self.tell(Tells.REGISTERED)
        await self._loads.wait()
        is_alone = self._is_alone.is_set()
        if not is_alone and not await asyncio.to_thread(fits_beside_others, settings):
            self.tell(Tells.NO_ROOM)
            await self._is_alone.wait()

    def serving(self, line: str) -> None:
        """Tell the owner that requests are claimed from now on; `line` says by what."""
        self.tell(Tells.SERVING, line)

    def tell(self, what: Tells, text: str = "") -> None:
        """Tell the owner, if it still lives."""
        with suppress(OSError):
            self._owner.send((what, text))
