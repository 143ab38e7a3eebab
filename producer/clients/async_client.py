"""The client for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import redis
import redis.asyncio

from promptq.producer.clients import operations
from promptq.producer.clients.connecting import (
    DEFAULT_QUEUE,
    address_of,
    check_is_alone,
    check_replies_are_bytes,
    explained,
    server_url,
    without_server,
)
from promptq.producer.clients.operations import Enqueue, ReadToEnd, as_method
from promptq.producer.clients.stream import (
    SILENCE_SECONDS,
    Action,
    Ask,
    Sleep,
    Steps,
    Subscribe,
    Wait,
    advance,
    follow,
)
from promptq.producer.clients.subscriptions import GoOn, Mailbox, Subscriptions
from promptq.producer.clients.tracing import enqueueing
from promptq.shared.errors import RedisUnavailableError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.queue.call import Operation, carry_out_async
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.tasks import heeding_cancels
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.runtime.turns import SLICE_SECONDS, Turns
from promptq.shared.server.connection import open_async_redis

P = ParamSpec("P")
T = TypeVar("T")


def _method(
    operation: Callable[Concatenate[Keys, P], Operation[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The method of a client that carries out an operation."""

    async def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with explained(client.url):
            keys = (await client._connected()).keys
            return await carry_out_async(operation(keys, *args, **kwargs), client._take)

    return as_method(method, operation)


class AsyncClient:
    """`promptq.Client` for asyncio: the same methods, awaited, with the same errors, and `follow`.

    It connects at the first call, or on entering `async with`. Any number of tasks may use it at
    once. At most 32 calls are on their way, and further calls wait for their turn. All streams
    together use one connection. If you give it a redis-py client, calls take at most half of that
    client's connections (its `max_connections`, by default 100). If several clients share one
    redis-py client, each may need 33 connections.
    """

    def __init__(
        self,
        server: str | redis.asyncio.Redis | None = None,
        queue: str | None = None,
        *,
        model: str | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        tracing: Tracing | None = None,
    ) -> None:
        if model is not None:
            check_is_alone(model, queue)
        self._keys = Keys(DEFAULT_QUEUE if queue is None else queue)
        self._model = model
        self._owned: redis.asyncio.Redis | None = None
        self._redis: redis.asyncio.Redis | None = None
        self._queue: AsyncRequestQueue | None = None
        self._subscriptions: Subscriptions | None = None
        self._connecting = asyncio.Lock()
        self._silence = silence_seconds
        self._tracing = tracing
        self.turns = Turns()
        """Shares the event loop among long work with events."""
        if isinstance(server, redis.asyncio.Redis):
            check_replies_are_bytes(server.connection_pool)
            self.url = address_of(server.connection_pool)
            self._use(server)
        else:
            self.url = server_url(server)

    @property
    def queue(self) -> AsyncRequestQueue:
        """The queue itself, for what the client has no method for.

        A client that was made from a URL has it once it is connected, such as in `async with`.
        """
        if self._queue is None or self._model is not None:
            raise RedisUnavailableError("the client is not connected yet: enter it with async with")
        return self._queue

    enqueue = _method(operations.enqueue)
    enqueue_many = _method(operations.enqueue_many)
    enqueue_composed = _method(operations.enqueue_composed)
    enqueue_samples = _method(operations.enqueue_samples)
    fork = _method(operations.fork)
    result = _method(operations.result)
    generate = _method(operations.generate)
    sample = _method(operations.sample)
    embed = _method(operations.embed)
    cancel = _method(operations.cancel)
    reprioritise = _method(operations.reprioritise)
    state = _method(operations.state)
    stats = _method(operations.stats)
    overview = _method(operations.overview)
    worker = _method(operations.worker)
    timeline = _method(operations.timeline)
    statistics = _method(operations.statistics)
    keep_statistics = _method(operations.keep_statistics)
    scaling = _method(operations.scaling)
    scalings = _method(operations.scalings)
    pause = _method(operations.pause)
    resume = _method(operations.resume)
    drain = _method(operations.drain)
    dead_ids = _method(operations.dead_ids)
    dead_letters = _method(operations.dead_letters)
    dead_letter = _method(operations.dead_letter)
    requeue = _method(operations.requeue)
    purge = _method(operations.purge)
    models = _method(operations.models)
    queue_of_model = _method(operations.queue_of_model)
    queue_of_request = _method(operations.queue_of_request)
    set_alias = _method(operations.set_alias)
    forget_model = _method(operations.forget_model)
    create_api_key = _method(operations.create_api_key)
    api_keys = _method(operations.api_keys)
    revoke_api_key = _method(operations.revoke_api_key)

    def stream(
        self, request_id: str, *, from_index: int = 0, timeout: float | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """As `Client.stream`. To leave the loop early, use `contextlib.aclosing`."""
        check_request_id(request_id)

        def begin() -> Callable[[Any], Any]:
            return partial(advance, self._steps(request_id, from_index, timeout))

        return self._carry_out(begin)

    async def follow(
        self,
        request_id: str,
        handle: Callable[[TokenEvent], Callable[[], Awaitable[None]] | None],
        *,
        from_index: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Call `handle` with each event of a stream as soon as it arrives, up to the last one.

        With `stream`, each event wakes up a task. With hundreds of streams that costs more than the
        events themselves. Here no task wakes up, and all streams of the client wait while `handle`
        runs. For work that takes time, `handle` returns a function, which is called and awaited
        before the stream goes on. Raises what `stream` and `handle` raise.
        """
        check_request_id(request_id)

        def begin() -> Callable[[Any], Any]:
            steps = self._steps(request_id, from_index, timeout)

            def go_on(answer: Any) -> Action | Callable[[], Awaitable[None]] | None:
                until = time.perf_counter() + SLICE_SECONDS
                action = advance(steps, answer)
                while type(action) is TokenEvent:  # isinstance of a pydantic class is slow
                    if (unfinished := handle(action)) is not None:
                        return unfinished
                    if time.perf_counter() > until:  # a log has many events
                        return self.turns.give_way
                    action = advance(steps, None)
                return action

            return go_on

        async with aclosing(self._carry_out(begin)) as all_unfinished:
            async for finish in all_unfinished:
                await finish()

    async def close(self) -> None:
        """As `Client.close`."""
        if self._queue is not None:
            await self._queue.close()
        if self._subscriptions is not None:
            await self._subscriptions.aclose()
        if self._owned is not None:
            await self._owned.aclose()

    async def __aenter__(self) -> Self:
        await self._connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _connected(self) -> AsyncRequestQueue:
        async with self._connecting:
            if self._redis is None:
                try:
                    self._owned = await heeding_cancels(open_async_redis(self.url))
                except RedisUnavailableError as error:
                    raise without_server(error) from error
                self._use(self._owned)
            if self._model is not None:
                finding = operations.queue_of_model(self._keys, self._model)
                assert self._redis is not None
                assert self._queue is not None
                with explained(self.url):
                    name = await heeding_cancels(carry_out_async(finding, self._queue.run))
                self._model, self._keys = None, Keys(name)
                self._use(self._redis)
        return self.queue

    def _use(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._queue = AsyncRequestQueue(client, self._keys.queue)
        self._keys = self._queue.keys
        self._subscriptions = Subscriptions(self._queue.redis)

    async def _take(self, step: Any) -> Any:
        """Take one step of an operation."""
        if isinstance(step, ReadToEnd):
            events: list[TokenEvent] = []
            await self.follow(step.request_id, events.append, timeout=step.timeout)
            return events
        queue = await self._connected()
        if isinstance(step, Enqueue):
            with enqueueing(self._tracing, self._keys.queue, step.new) as traced:
                return await heeding_cancels(queue.enqueue(traced))
        return await heeding_cancels(queue.run(step))

    def _steps(self, request_id: str, from_index: int, timeout: float | None) -> Steps:
        return follow(self._keys, request_id, from_index, silence=self._silence, timeout=timeout)

    async def _carry_out(self, begin: Callable[[], GoOn[Any]]) -> AsyncGenerator[Any, None]:
        """Carry out a stream's actions, once the client is connected and knows its queue.

        Yields whatever else the function of `begin` gives, until it gives None.
        """
        await self._connected()
        go_on = begin()
        assert self._subscriptions is not None
        with explained(self.url):
            async with aclosing(self._subscriptions.mailbox()) as mailbox:
                todo = go_on(None)
                while todo is not None:
                    if isinstance(todo, Wait):
                        todo = await mailbox.listen(todo.seconds, go_on)
                    elif isinstance(todo, (Ask, Sleep, Subscribe)):
                        todo = go_on(await heeding_cancels(self._perform(todo, mailbox)))
                    else:
                        yield todo
                        todo = go_on(None)

    async def _perform(self, action: Action, mailbox: Mailbox) -> Any:
        try:
            match action:
                case Ask(call):
                    return await (await self._connected()).run(call)
                case Sleep(seconds):
                    await asyncio.sleep(seconds)
                case Subscribe(channel, sharded):
                    await mailbox.subscribe(channel, sharded)
        except redis.RedisError as error:
            return error
