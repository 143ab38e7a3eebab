"""Reads the data of open pages once a second. Pages with the same data share one reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from promptq.producer.calls.errors import ApiError
from promptq.shared.errors import RedisSideError
from promptq.shared.queue.spoilt import note
from promptq.shared.runtime.tasks import kept_up

INTERVAL_SECONDS = 1.0

Topic = tuple[str, ...]
"""Names a page's data: a queue, a kind such as `worker`, and perhaps an id or filters."""


@dataclass(slots=True)
class _Watched:
    """A topic that pages watch. Keeps only the latest value, so a slow page misses older ones."""

    num_watchers: int = 0
    latest: str | None = None
    version: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


class Poller:
    """Reads each watched topic every `interval` seconds. `read` returns the JSON of a topic.

    The poller stops when no page is open, so an unused dashboard sends the server no commands.
    """

    def __init__(
        self, read: Callable[[Topic], Awaitable[str]], interval: float = INTERVAL_SECONDS
    ) -> None:
        self._read = read
        self._interval = interval
        self._topics: dict[Topic, _Watched] = {}
        self._task: asyncio.Task[None] | None = None

    async def watch(self, topic: Topic) -> AsyncGenerator[str | None, None]:
        """Yields the topic's JSON at once, and after each reading; None if a reading failed."""
        watched = self._topics.setdefault(topic, _Watched())
        watched.num_watchers += 1
        try:
            seen = 0
            if watched.version == 0:
                await self._refresh(topic, watched)
            if self._task is None:
                self._task = asyncio.create_task(kept_up("dashboard", self._run))
            while True:
                async with watched.changed:
                    while watched.version == seen:
                        await watched.changed.wait()
                    seen, latest = watched.version, watched.latest
                yield latest
        finally:
            watched.num_watchers -= 1
            if watched.num_watchers == 0:
                self._topics.pop(topic, None)
            if not self._topics and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            for topic, watched in list(self._topics.items()):
                await self._refresh(topic, watched)

    async def _refresh(self, topic: Topic, watched: _Watched) -> None:
        latest = None
        try:
            latest = await self._read(topic)
        except (RedisSideError, ApiError):
            pass  # pages show that the queue cannot be reached
        except Exception as error:  # one wrong record must not stop all pages
            note(error, " ".join(topic))
        async with watched.changed:
            watched.latest = latest
            watched.version += 1
            watched.changed.notify_all()
