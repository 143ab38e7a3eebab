"""Finds the queue of a model or a request among a gateway's queues, and reads queues' states."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

from promptq.producer.admin.queue_views import MOST_QUEUES, QueueView, not_served, queue_view
from promptq.producer.calls.errors import ApiError, unknown_completion
from promptq.producer.calls.output_lengths import Features, OutputLengths
from promptq.producer.clients.async_client import AsyncClient
from promptq.shared.errors import ModelNotServedError, SpoiltRecordError
from promptq.shared.protocol.keys import ALIASES, ALL_QUEUES, QUEUES, Keys
from promptq.shared.protocol.request import NewRequest
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call, carry_out_async

_FRESH_SECONDS = 1.0
"""Seconds after which the state of a queue, or the list of queues and aliases, is read again."""
_MOST_OPENED = 4 * MOST_QUEUES
"""The most queues that a gateway opens. They stay open, because old streams may need them."""
_REFUSED_SECONDS = 60.0
"""Seconds for which the gateway skips a queue that it cannot read."""
_AWAY_SECONDS = 1.0
"""Seconds for which the gateway skips a queue whose server did not answer."""


class ServedQueue:
    """A queue that a gateway serves: its client, and its state, at most a second old."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.queue = client.queue
        self.name = client.queue.keys.queue
        self.num_sent = 0
        """Number of requests that were sent to the queue since its state was read."""
        self._lengths: OutputLengths | None = None
        """None unless the queue orders requests by their expected output."""
        self._view: QueueView | None = None
        self._viewed_at = float("-inf")
        self._viewing = asyncio.Lock()

    @property
    def is_old(self) -> bool:
        """Whether the state is too old, so that the next `view` reads it again."""
        return time.monotonic() - self._viewed_at > _FRESH_SECONDS

    async def view(self, *, now: bool = False) -> QueueView:
        """Returns the queue's state; with `now`, reads it now. Raises redis.RedisError."""
        async with self._viewing:
            if self._view is None or self.is_old or now:
                self._view = await carry_out_async(queue_view(self.queue.keys), self.queue.run)
                self._viewed_at = time.monotonic()
                self.num_sent = 0
                await self._learn_lengths(self._view)
            return self._view

    async def _learn_lengths(self, view: QueueView) -> None:
        self._lengths = (self._lengths or OutputLengths()) if view.is_shortest_first else None
        if self._lengths is not None:
            await carry_out_async(self._lengths.learn(self.queue.keys), self.queue.run)

    def with_guesses(
        self, new: list[NewRequest], features: Sequence[Features], *, watch: bool = True
    ) -> list[NewRequest]:
        """Returns the requests, with guesses of their outputs if these decide their order. For
        `watch`, see `OutputLengths`."""
        if self._lengths is None:
            return new
        return self._lengths.with_guesses(new, features, watch=watch)

    async def has(self, key: str) -> bool:
        """Returns whether a Redis key of the queue exists. Raises redis.RedisError."""
        return await self.queue.run(Call("", ["EXISTS", key], bool))


Found = tuple[ServedQueue, QueueView]
"""A queue, and its state, which is at most a second old."""


@dataclass(slots=True)
class _Directory:
    """The names of the server's queues and the aliases of models, as they were at `read_at`."""

    names: list[str] = field(default_factory=list)
    aliases: Mapping[str, str] = field(default_factory=dict)
    read_at: float = float("-inf")


class ServedQueues:
    """The queues that a gateway serves. The client of a queue is created when it is first needed.

    The first of `names` is the gateway's own queue, which has the API keys, files and batches. `*`
    (ALL_QUEUES) stands for all other queues of the server.

    Methods that call the server raise redis.RedisError if the server of the gateway's own queue
    does not answer. Other queues that cannot be read are skipped. If a queue's server does not
    answer (is away), the queue is tried again after a second. A queue that cannot be read for
    another reason is tried again after a minute.
    """

    def __init__(
        self,
        open_client: Callable[[str], AsyncClient],
        names: Sequence[str],
        *,
        on_unreadable: Callable[[str, str], object] = lambda _name, _why: None,
    ) -> None:
        """`on_unreadable(queue, reason)` is called once for each queue that cannot be read."""
        self._open_client = open_client
        self._on_unreadable = on_unreadable
        self._names = [name for name in dict.fromkeys(names) if name != ALL_QUEUES]
        self._finds_others = ALL_QUEUES in names
        self._opened: dict[str, ServedQueue] = {}
        self._directory = _Directory()
        self._reading = asyncio.Lock()
        self._refused: dict[str, float] = {}
        self._away: dict[str, RedisError] = {}
        """For each queue whose server does not answer, the last error."""
        self.own = self._served(self._names[0])

    async def aclose(self) -> None:
        for served in self._opened.values():
            await served.client.close()

    @property
    def opened(self) -> list[ServedQueue]:
        """The queues that were used so far, even if their server is away."""
        return [*self._opened.values()]

    def guess_outputs(self) -> bool:
        """Returns whether a queue that was used so far guesses the outputs of its requests."""
        return any(queue._lengths is not None for queue in self._opened.values())

    def may_serve(self, name: str) -> bool:
        """Returns whether the gateway serves this queue, or would if a worker joined the queue."""
        return self._finds_others or name in self._names

    async def all(self, *, now: bool = False) -> list[ServedQueue]:
        """Returns all queues that can be read, the gateway's own first. With `now`, reads the list
        of queues again, even if it was read a moment ago."""
        names = [*self._names]
        if self._finds_others or now:
            names += [name for name in (await self._read(now=now)).names if name not in names]
        if len(self._opened) >= _MOST_OPENED:
            names = [name for name in names if name in self._opened]
        return [self._served(name) for name in names if not self._is_refused(name)]

    async def named(self, name: str) -> ServedQueue:
        """Returns the queue of this name; for '' the gateway's own queue. Raises ApiError 404."""
        if not name:
            return self.own
        served = await self.all()
        for queue in served:
            if queue.name == name:
                return queue
        names = ", ".join(queue.name for queue in served)
        raise ApiError(
            404, f"queue: {name[:80]!r} is not served here; served are {names}", param="queue"
        )

    async def aliases(self) -> Mapping[str, str]:
        """Maps aliases to names of models. Leaves out aliases that are names of served models."""
        aliases = (await self._read()).aliases
        if not aliases:
            return aliases
        names = {view.model for _, view in await self.views()}
        return {alias: name for alias, name in aliases.items() if alias not in names}

    async def views(self, *, now: bool = False) -> list[Found]:
        """Returns the queues that can be read, each with its state, which is at most a second old.
        With `now`, reads the states now."""
        served = await self.all(now=now)
        old = [queue for queue in served if now or queue.is_old]
        reads = (queue.view(now=now) for queue in old)
        errors = await asyncio.gather(*reads, return_exceptions=True)
        for queue, error in zip(old, errors, strict=True):
            if isinstance(error, BaseException):
                self._leave_out(queue, error)
            else:
                self._away.pop(queue.name, None)
        readable = [queue for queue in served if not self._is_refused(queue.name)]
        return [(queue, await queue.view()) for queue in readable]

    async def of_model(
        self, model: str | None, known_as: Callable[[Keys], str] | None = None
    ) -> Found:
        """Returns the queue that serves a model; without a model, the gateway's own queue. If no
        queue serves the model, returns the gateway's only queue if that has no model yet. Otherwise
        raises ModelIsLoadingError, ModelNotServedError, or the error of a server that is away.

        If several queues serve the model, returns the one with the fewest requests for each worker.

        With `known_as`, the call has an idempotency key, and must not run in two queues. `known_as`
        maps the `Keys` of a queue to the Redis key that exists if the queue got the call before. If
        several queues serve the model, returns the queue whose key exists. If no key exists,
        chooses by a hash of the Redis key, preferably among queues with claiming workers.
        """
        own = self.own, await self.own.view()
        is_alone = len(self._names) == 1 and not self._finds_others
        if not model or (is_alone and model == own[1].model):
            return own
        views = await self.views()
        serving = [at for at in views if at[1].model == model]
        if not serving:
            return self._of_model_to_come(model, views)
        if len(serving) == 1:
            return serving[0]
        if known_as is None:
            return min(serving, key=lambda at: at[1].load(at[0].num_sent))
        known = await asyncio.gather(*(at[0].has(known_as(at[0].queue.keys)) for at in serving))
        if any(known):
            return serving[known.index(True)]
        return max(serving, key=lambda at: (at[1].hands_out, _rank(known_as(at[0].queue.keys))))

    def _of_model_to_come(self, model: str, views: Sequence[Found]) -> Found:
        """Returns the queue for a model that no queue serves: the gateway's only queue, if this has
        no model yet. (The queue's first worker may serve the model.) Otherwise raises
        ModelIsLoadingError, ModelNotServedError, or the error of a queue whose server is away."""
        if len(views) == 1 and not views[0][1].model:
            return views[0]
        without_model = [queue.name for queue, view in views if not view.model]
        loading = [name for name in without_model if name in self._names]
        if loading and len(self._names) > 1:
            raise ModelIsLoadingError(model, loading)
        self._raise_if_away()
        raise ModelNotServedError(not_served(model, {view.model for _, view in views}))

    async def holding(self, request_id: str) -> ServedQueue:
        """Returns the queue that has a request. If only one queue is known, returns this queue
        without a search. Raises RequestNotFoundError, or the error of a server that is away."""
        served = await self.all()
        served += [queue for queue in self.opened if queue not in served]
        if len(served) == 1:
            return self.own
        looking = [queue.has(queue.queue.keys.request(request_id)) for queue in served]
        known = await asyncio.gather(*looking, return_exceptions=True)
        for queue, is_known in zip(served, known, strict=True):
            if isinstance(is_known, BaseException):
                self._leave_out(queue, is_known)
            elif is_known:
                return queue
        self._raise_if_away()
        raise unknown_completion(request_id)

    def _served(self, name: str) -> ServedQueue:
        if name not in self._opened:
            self._opened[name] = ServedQueue(self._open_client(name))
        return self._opened[name]

    async def _read(self, *, now: bool = False) -> _Directory:
        async with self._reading:
            if now or time.monotonic() - self._directory.read_at > _FRESH_SECONDS:
                names: list[str] = []
                aliases: dict[str, str] = {}
                try:
                    if self._finds_others:
                        names = (await self.own.queue.run(lookups.queue_names()))[:MOST_QUEUES]
                    aliases = await self.own.queue.run(lookups.aliases())
                except ResponseError as error:  # the Redis user may be limited to one queue
                    self._refuse(f"{QUEUES}, {ALIASES}", error)
                except (ConnectionError, TimeoutError):  # on a Cluster, only one node may be away
                    if not self._directory.names:
                        raise
                    names, aliases = self._directory.names, dict(self._directory.aliases)
                self._directory = _Directory(names, aliases, time.monotonic())
            return self._directory

    def _is_refused(self, name: str) -> bool:
        return time.monotonic() < self._refused.get(name, 0.0)

    def _leave_out(self, queue: ServedQueue, error: BaseException) -> None:
        """Skips a queue for some time, because reading it has raised `error`. If the queue is the
        gateway's own, raises `error` again."""
        if queue is self.own or not isinstance(error, RedisError | SpoiltRecordError):
            raise error
        if isinstance(error, ResponseError | SpoiltRecordError):
            self._refuse(queue.name, error)
        else:
            self._away[queue.name] = error
            self._refused[queue.name] = time.monotonic() + _AWAY_SECONDS

    def _raise_if_away(self) -> None:
        """If a queue's server is away, raises its error, because that queue was not searched."""
        for name, error in self._away.items():
            if name in self._names or name in self._directory.names:
                raise error

    def _refuse(self, name: str, error: Exception) -> None:
        if name not in self._refused:
            self._on_unreadable(name, str(error))
        self._refused[name] = time.monotonic() + _REFUSED_SECONDS


def log_unreadable(name: str, why: str) -> None:
    """Logs that a queue cannot be read. Processes with a log pass this as `on_unreadable`."""
    from promptq.shared.runtime.logs import get_logger  # local batches may lack structlog

    get_logger().warning("a queue cannot be read, and is not served", of=name, why=why)


class ModelIsLoadingError(ApiError):
    """No queue serves the model, but at least one queue has no model yet, because no worker has
    joined it."""

    def __init__(self, model: str, queues: Sequence[str]) -> None:
        names = ", ".join(queues)
        super().__init__(
            503,
            f"model: no queue serves {model[:200]!r} yet, and no worker has come to {names}",
            param="model",
            code="no_worker",
            headers={"Retry-After": "5"},
        )


def _rank(key: str) -> bytes:
    """Returns the rank of a queue for a request, from a key that names both. The queue with the
    highest rank gets the request, so all gateways agree, and few requests move when a queue is
    added (https://en.wikipedia.org/wiki/Rendezvous_hashing)."""
    return hashlib.sha256(key.encode()).digest()
