"""The client for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from typing import Any, Self, TypeVar

import redis
import redis.asyncio

from promptq.producer.admin import api_keys
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.admin.dead_letters import DeadLetter, read_dead_letter, read_dead_letters
from promptq.producer.admin.overview import (
    Overview,
    WorkerView,
    keep_statistics,
    read_overview,
    read_statistics,
    read_worker,
)
from promptq.producer.admin.queue_control import drain_workers, reprioritise, set_paused
from promptq.producer.admin.queue_stats import QueueStats, read_stats
from promptq.producer.admin.timeline import Timeline, read_timeline
from promptq.producer.clients.connecting import (
    address_of,
    check_replies_are_bytes,
    explained,
    server_url,
    without_server,
)
from promptq.producer.clients.request_builder import (
    Messages,
    Prompt,
    call_fields,
    compose,
    compose_samples,
)
from promptq.producer.clients.results import Samples, fold
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
from promptq.shared.protocol.events import Result, TokenEvent
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.protocol.replies import CancelStatus, PriorityStatus
from promptq.shared.protocol.request import NewRequest, RequestState
from promptq.shared.protocol.worker_stats import Sample
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.tasks import heeding_cancels
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.server.connection import open_async_redis

T = TypeVar("T")


class AsyncClient:
    """`promptq.Client` for asyncio: the same methods, awaited, with the same errors, and `follow`.

    It connects at the first call, or on entering `async with`. Any number of tasks may use it at
    once: at most 32 calls are on their way, more wait for their turn, and all streams together keep
    one connection. Of those that a given redis-py client may have (`max_connections`, 100 unless it
    says otherwise), calls take half at most; where several clients share it, each may need 33.
    """

    def __init__(
        self,
        server: str | redis.asyncio.Redis | None = None,
        queue: str = "default",
        *,
        silence_seconds: float = SILENCE_SECONDS,
        tracing: Tracing | None = None,
    ) -> None:
        self._keys = Keys(queue)
        self._owned: redis.asyncio.Redis | None = None
        self._queue: AsyncRequestQueue | None = None
        self._subscriptions: Subscriptions | None = None
        self._connecting = asyncio.Lock()
        self._silence = silence_seconds
        self._tracing = tracing
        if isinstance(server, redis.asyncio.Redis):
            check_replies_are_bytes(server.connection_pool)
            self.url = address_of(server.connection_pool)
            self._use(server)
        else:
            self.url = server_url(server)

    async def enqueue(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        delay_ms: int = 0,
        **fields: Any,
    ) -> str:
        """As `Client.enqueue`."""
        request = call_fields(prompt, messages, request_id, delay_ms, fields)
        return (await self.enqueue_many([request]))[0]

    async def enqueue_many(self, requests: Iterable[Mapping[str, Any]]) -> list[str]:
        """As `Client.enqueue_many`."""
        return await self.enqueue_composed(compose(requests))

    async def enqueue_composed(self, new: list[NewRequest]) -> list[str]:
        """As `enqueue_many`, of what `compose` gives."""
        return await self._enqueue(new)

    async def enqueue_samples(
        self,
        n: int,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        delay_ms: int = 0,
        **fields: Any,
    ) -> list[str]:
        """As `Client.enqueue_samples`."""
        request = call_fields(prompt, messages, request_id, delay_ms, fields)
        return await self._enqueue(compose_samples(n, request))

    def stream(
        self, request_id: str, *, from_index: int = 0, timeout: float | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """As `Client.stream`. Who leaves the loop early closes it with `contextlib.aclosing`."""
        return self._carry_out(partial(advance, self._steps(request_id, from_index, timeout)))

    async def follow(
        self,
        request_id: str,
        handle: Callable[[TokenEvent], Callable[[], Awaitable[None]] | None],
        *,
        from_index: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Call `handle` with each event of a stream where it is heard, until its last.

        In `stream` each event wakes up a task, which costs more than the event where hundreds are
        followed; here all streams of the client wait while one's event is handled. A function that
        `handle` gives is called and awaited before the stream goes on, for what takes time. Raises
        what `stream` does, and what `handle` raises.
        """
        steps = self._steps(request_id, from_index, timeout)

        def go_on(answer: Any) -> Action | Callable[[], Awaitable[None]] | None:
            action = advance(steps, answer)
            while type(action) is TokenEvent:  # isinstance asks pydantic, for whatever is none
                if (unfinished := handle(action)) is not None:
                    return unfinished
                action = advance(steps, None)
            return action

        async with aclosing(self._carry_out(go_on)) as all_unfinished:
            async for finish in all_unfinished:
                await finish()

    async def result(
        self, request_id: str, *, timeout: float | None = None, check: bool = True
    ) -> Result:
        """As `Client.result`."""
        events: list[TokenEvent] = []
        await self.follow(request_id, events.append, timeout=timeout)
        return fold(request_id, events, check)

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        timeout: float | None = None,
        check: bool = True,
        **fields: Any,
    ) -> Result:
        """As `Client.generate`. A task that is cancelled here does not cancel the request."""
        request_id = await self.enqueue(prompt, **fields)
        return await self.result(request_id, timeout=timeout, check=check)

    async def sample(
        self,
        n: int,
        prompt: Prompt | None = None,
        *,
        timeout: float | None = None,
        check: bool = True,
        **fields: Any,
    ) -> Samples:
        """As `Client.sample`."""
        request_ids = await self.enqueue_samples(n, prompt, **fields)
        deadline = None if timeout is None else time.monotonic() + timeout
        results = []
        for request_id in request_ids:
            left = None if deadline is None else deadline - time.monotonic()
            results.append(await self.result(request_id, timeout=left, check=check))
        return Samples(request_ids, results)

    async def cancel(self, request_id: str) -> CancelStatus:
        """As `Client.cancel`."""
        with explained(self.url):
            queue = await self._connected()
            return await heeding_cancels(queue.cancel(check_request_id(request_id)))

    async def reprioritise(self, request_id: str, priority: int) -> PriorityStatus:
        """As `Client.reprioritise`."""
        calls = reprioritise(self._keys, check_request_id(request_id), priority)
        return await self._converse(calls)

    async def state(self, request_id: str) -> RequestState | None:
        """As `Client.state`."""
        with explained(self.url):
            queue = await self._connected()
            return await heeding_cancels(queue.state(check_request_id(request_id)))

    async def stats(self) -> QueueStats:
        """As `Client.stats`."""
        return await self._converse(read_stats(self._keys))

    async def overview(self) -> Overview:
        """As `Client.overview`."""
        return await self._converse(read_overview(self._keys))

    async def worker(self, worker_id: str) -> WorkerView:
        """As `Client.worker`."""
        return await self._converse(read_worker(self._keys, worker_id))

    async def timeline(self, request_id: str) -> Timeline:
        """As `Client.timeline`."""
        return await self._converse(read_timeline(self._keys, check_request_id(request_id)))

    async def statistics(self, since_ms: int = 0) -> list[Sample]:
        """As `Client.statistics`."""
        return await self._converse(read_statistics(self._keys, since_ms))

    async def keep_statistics(self) -> None:
        """As `Client.keep_statistics`."""
        await self._converse(keep_statistics(self._keys))

    async def pause(self) -> None:
        """As `Client.pause`."""
        await self._converse(set_paused(self._keys, True))

    async def resume(self) -> None:
        """As `Client.resume`."""
        await self._converse(set_paused(self._keys, False))

    async def drain(self, worker_id: str | None = None) -> list[str]:
        """As `Client.drain`."""
        return await self._converse(drain_workers(self._keys, worker_id))

    async def dead_ids(self, limit: int = 100) -> list[str]:
        """As `Client.dead_ids`."""
        with explained(self.url):
            queue = await self._connected()
            return await heeding_cancels(queue.run(lookups.dead_ids(self._keys, limit)))

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """As `Client.dead_letters`."""
        return await self._converse(read_dead_letters(self._keys, limit))

    async def dead_letter(self, request_id: str) -> DeadLetter:
        """As `Client.dead_letter`."""
        return await self._converse(read_dead_letter(self._keys, check_request_id(request_id)))

    async def requeue(self, request_id: str) -> str:
        """As `Client.requeue`."""
        with explained(self.url):
            queue = await self._connected()
            return await heeding_cancels(queue.requeue(request_id))

    async def purge(self, request_ids: Sequence[str]) -> int:
        """As `Client.purge`."""
        with explained(self.url):
            queue = await self._connected()
            return await heeding_cancels(queue.purge(request_ids))

    async def create_api_key(self, key: ApiKey, weight: float | None = None) -> tuple[str, ApiKey]:
        """As `Client.create_api_key`."""
        return await self._converse(api_keys.create(self._keys, key, weight))

    async def api_keys(self) -> list[ApiKey]:
        """As `Client.api_keys`."""
        return await self._converse(api_keys.list_all(self._keys))

    async def revoke_api_key(self, name: str) -> ApiKey:
        """As `Client.revoke_api_key`."""
        return await self._converse(api_keys.revoke(self._keys, name))

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
            if self._queue is None:
                try:
                    self._owned = await heeding_cancels(open_async_redis(self.url))
                except RedisUnavailableError as error:
                    raise without_server(error) from error
                self._use(self._owned)
        assert self._queue is not None
        return self._queue

    def _use(self, client: redis.asyncio.Redis) -> None:
        self._subscriptions = Subscriptions(client)
        self._queue = AsyncRequestQueue(client, self._keys.queue)

    async def _enqueue(self, new: list[NewRequest]) -> list[str]:
        if not new:
            return []
        queue = await self._connected()
        with explained(self.url), enqueueing(self._tracing, self._keys.queue, new) as traced:
            return await heeding_cancels(queue.enqueue(traced))

    async def _converse(self, calls: Generator[Call[Any], Any, T]) -> T:
        answer: Any = None
        queue = await self._connected()
        with explained(self.url):
            while True:
                try:
                    call = calls.send(answer)
                except StopIteration as stop:
                    value: T = stop.value
                    return value
                answer = await heeding_cancels(queue.run(call))

    def _steps(self, request_id: str, from_index: int, timeout: float | None) -> Steps:
        return follow(
            self._keys,
            check_request_id(request_id),
            from_index,
            silence=self._silence,
            timeout=timeout,
        )

    async def _carry_out(self, go_on: GoOn[Any]) -> AsyncGenerator[Any, None]:
        """Carry out a stream's actions, and yield what else `go_on` gives, until it gives None."""
        await self._connected()
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
