"""The client for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self, TypeVar

import redis
import redis.asyncio

from promptq.producer import admin
from promptq.producer.admin.autoscaling_defaults import TARGET_SECONDS
from promptq.producer.clients.connecting import (
    DEFAULT_QUEUE,
    address_of,
    check_one_of,
    check_replies_are_bytes,
    explained,
    server_url,
    without_server,
)
from promptq.producer.clients.forks import check_changes, fork_source
from promptq.producer.clients.request_builder import (
    Messages,
    Prompt,
    call_fields,
    compose,
    compose_embeddings,
    compose_samples,
)
from promptq.producer.clients.results import (
    Embeddings,
    Samples,
    checked_vector,
    countdown,
    fold,
)
from promptq.producer.clients.resumable_stream import (
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
from promptq.shared.protocol.request import NewRequest, Pooling, RequestState
from promptq.shared.protocol.worker_stats import Sample
from promptq.shared.queue import lookups, request_queue, scripts, statistics
from promptq.shared.queue.call import Call, Operation, carry_out_async
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.tasks import heeding_cancels
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.runtime.turns import SLICE_SECONDS, Turns
from promptq.shared.server.connection import open_async_redis

T = TypeVar("T")


class AsyncClient:
    """`promptq.Client` for asyncio, with awaitable methods that raise the same errors, and
    `follow`.

    It connects at the first call, or on entering `async with`. Any number of tasks may use it at
    once. At most 32 calls are on their way, and further calls wait for their turn. All streams
    together use one connection. With a redis-py client that you pass, calls take at most half of
    its connections (`max_connections`, by default 100). If several clients share one redis-py
    client, each may need 33 connections.
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
        check_one_of(model, queue)
        self._queue_name = Keys(DEFAULT_QUEUE if queue is None else queue).queue
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
        """The queue itself, for operations that the client has no method for.

        A client that was made from a URL has it once it is connected, such as in `async with`.
        """
        if self._queue is None or self._model is not None:
            raise RedisUnavailableError("the client is not connected yet: enter it with async with")
        return self._queue

    # Enqueue requests, read what comes back

    async def enqueue(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        delay_ms: int = 0,
        **fields: Any,
    ) -> str:
        """Enqueue a request. Returns its id: `request_id`, or by default a UUIDv7.

        `prompt` is text or token ids; `messages` goes through the model's chat template; `fields`
        are those of `promptq.shared.protocol.request.Request` (`max_tokens`, `temperature`,
        `priority`, ...). With `delay_ms` the request waits at least that long.

        Raises InvalidRequestError, RequestExistsError, QueueFullError. If the reply gets lost, the
        request is sent again, and the server recognises it. If the server stays away, nobody can
        say whether the request arrived; with an `idempotency_key` it is safe to repeat the call.
        """
        request = call_fields(prompt, messages, request_id, delay_ms, fields)
        [own_id] = await self.enqueue_many([request])
        return own_id

    async def enqueue_many(self, requests: Iterable[Mapping[str, Any]]) -> list[str]:
        """Enqueue requests, all or none. Returns their ids.

        Each request is a mapping of the arguments of `enqueue`: `{"prompt": "Once", "max_tokens":
        8}`.
        """
        return await self.enqueue_composed(compose(requests))

    async def enqueue_composed(self, new: list[NewRequest]) -> list[str]:
        """Like `enqueue_many`, for requests that `request_builder.compose` made."""
        return await self._enqueue(new) if new else []

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
        """Enqueue `n` requests with the same prompt, all or none.

        Their ids are `ID:0` ... `ID:n-1`. If `seed` is given, their seeds are `seed + i`.
        """
        request = call_fields(prompt, messages, request_id, delay_ms, fields)
        return await self.enqueue_composed(compose_samples(n, request))

    async def fork(
        self,
        request_id: str,
        *,
        at: int | None = None,
        append: str = "",
        fork_id: str | None = None,
        delay_ms: int = 0,
        **changes: Any,
    ) -> str:
        """Continue from the first `at` tokens of a request as a new one. Returns the new id.

        The source, `request_id`, may run or have ended. Without `at`, the fork continues after all
        of its tokens. The fork's output begins with these tokens and the text `append`. They and
        the prompt cost little while the source's worker has them in its prefix cache. The id is
        `fork_id`, or a UUIDv7. The fork has the source's payload without its seed and idempotency
        key. `changes` are further fields, such as `temperature`. `max_tokens` counts only tokens
        after the prefix.

        Raises InvalidRequestError, also for an `at` beyond the source's tokens,
        RequestNotFoundError if the source is unknown or has expired, and what `enqueue` raises.
        """
        check_changes(changes)
        source = await self._do(fork_source(await self._keys(), check_request_id(request_id)))
        own = {**changes, "request_id": fork_id, "delay_ms": delay_ms}
        [own_id] = await self.enqueue_composed([source.compose_fork(at, append, own)])
        return own_id

    async def result(
        self, request_id: str, *, timeout: float | None = None, check: bool = True
    ) -> Result:
        """Wait for the request to end and return its whole result.

        The result of a cancelled or expired request holds its tokens so far. Raises
        RequestFailedError if the request ended with an error, unless `check` is false. Raises
        TimeoutError after `timeout` seconds; the request then continues, unless you call `cancel`.
        Raises RequestNotFoundError and StreamChangedError like `stream`.
        """
        return fold(request_id, await self._read(request_id, timeout), check)

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        timeout: float | None = None,
        check: bool = True,
        **fields: Any,
    ) -> Result:
        """Enqueue a request and return its result. The request continues if you stop waiting."""
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
        """Enqueue samples and return the results of all; `timeout` is for all together."""
        request_ids = await self.enqueue_samples(n, prompt, **fields)
        left = countdown(timeout)
        results = [await self.result(each, timeout=left(), check=check) for each in request_ids]
        return Samples(request_ids, results)

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> Embeddings:
        """Turn a text, or several, into vectors. Texts are enqueued all or none.

        A text may be token ids. `pooling` is `last` (the last token's hidden state), `mean` (of all
        tokens) or the worker's default. `dimensions` is how many numbers to keep of each vector.
        `fields` are as in `enqueue`; fields for generation have no effect. `timeout` (seconds) is
        for all texts together.

        Raises what `enqueue` and `result` raise, and RequestFailedError for a request that ended
        without a vector.
        """
        embed = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
        new = compose_embeddings(texts, {**fields, "embed": embed})
        request_ids = await self.enqueue_composed(new)
        left = countdown(timeout)
        results = [await self.result(each, timeout=left()) for each in request_ids]
        return Embeddings(request_ids, list(map(checked_vector, request_ids, results)))

    # One request

    async def cancel(self, request_id: str) -> CancelStatus:
        """End a request: at once if it waits, at its worker's next step if it runs."""
        [status] = await self._do(scripts.cancel([check_request_id(request_id)]))
        return status

    async def reprioritise(self, request_id: str, priority: int) -> PriorityStatus:
        """Move a waiting request to the place of requests that were enqueued with this priority.

        Returns a status: a request that a worker holds does not change. Raises InvalidRequestError.
        """
        return await self._do(
            admin.queue_control.reprioritise(await self._keys(), request_id, priority)
        )

    async def state(self, request_id: str) -> RequestState | None:
        """Returns the state of a request; None if it is unknown."""
        return await self._do(lookups.state(await self._keys(), check_request_id(request_id)))

    async def timeline(self, request_id: str) -> admin.timeline.Timeline:
        """Returns what happened to a request, and when. Raises RequestNotFoundError."""
        return await self._do(admin.timeline.timeline(await self._keys(), request_id))

    # The queue and its workers

    async def stats(self) -> admin.queue_stats.QueueStats:
        """Returns the numbers of requests by state, and the workers' last heartbeats."""
        return await self._do(admin.queue_stats.stats(await self._keys()))

    async def overview(self) -> admin.overview.Overview:
        """Returns the state of the queue and its workers, with the latest statistics."""
        return await self._do(admin.overview.overview(await self._keys()))

    async def worker(self, worker_id: str) -> admin.overview.WorkerView:
        """A worker and its batch as it is now. Raises RequestNotFoundError for one that is gone."""
        return await self._do(admin.overview.worker(await self._keys(), worker_id))

    async def statistics(self, since_ms: int = 0) -> list[Sample]:
        """Samples of the queue's statistics from `since_ms` (Unix milliseconds of the server) on.

        There is one for each 5 s of the last hour. The oldest comes first.
        """
        return await self._do(statistics.samples(await self._keys(), since_ms))

    async def keep_statistics(self) -> None:
        """Take a sample if one is due. Call this every few seconds if all workers may be away."""
        await self._do(statistics.sample(statistics.Contribution()))

    async def scaling(self, target_seconds: float = TARGET_SECONDS) -> admin.autoscaling.Scaling:
        """Returns the workers that the queue needs to keep waits below `target_seconds`."""
        return await self._do(admin.autoscaling.scaling(await self._keys(), target_seconds))

    async def scalings(
        self, target_seconds: float = TARGET_SECONDS
    ) -> list[admin.autoscaling.Scaling]:
        """Returns the scaling of all readable queues of the server."""
        return await self._do(admin.autoscaling.scalings(await self._keys(), target_seconds))

    async def pause(self) -> None:
        """Stop handing out requests. New ones are accepted and wait; running ones finish."""
        await self._do(scripts.set_paused(await self._keys(), True))

    async def resume(self) -> None:
        """Hand out requests again after `pause`."""
        await self._do(admin.queue_control.resume(await self._keys()))

    async def drain(self, worker_id: str | None = None) -> list[str]:
        """Make all workers, or one, claim no more, finish their requests and exit. Returns the
        workers' ids."""
        return await self._do(admin.queue_control.drain(await self._keys(), worker_id))

    # Dead letters

    async def dead_ids(self, limit: int = 100) -> list[str]:
        """Ids of dead letters, the latest first."""
        return await self._do(lookups.dead_ids(await self._keys(), limit))

    async def dead_letters(self, limit: int = 100) -> list[admin.dead_letters.DeadLetter]:
        """Requests that were given up because they crash their workers, the latest first."""
        return await self._do(admin.dead_letters.dead_letters(await self._keys(), limit))

    async def dead_letter(self, request_id: str) -> admin.dead_letters.DeadLetter:
        """One dead letter. Raises RequestNotFoundError."""
        return await self._do(admin.dead_letters.dead_letter(await self._keys(), request_id))

    async def requeue(self, request_id: str) -> str:
        """Run a dead letter again; return the new request's id. Raises RequestNotFoundError."""
        return await self._do(request_queue.requeue(request_id))

    async def purge(self, request_ids: Sequence[str]) -> int:
        """Delete dead letters; return the number of deleted ones."""
        statuses = await self._do(scripts.purge(request_ids)) if request_ids else []
        return statuses.count("purged")

    # Models and their queues

    async def models(self) -> list[admin.queue_views.ServedModel]:
        """The models of all queues of the server, by name. A queue without a model is left out."""
        return await self._do(admin.queue_views.models(await self._keys()))

    async def queue_of_model(self, model: str) -> str:
        """Returns the queue that serves a model, by its name or an alias.

        If several serve it, returns the one with the fewest requests for each worker. Raises
        ModelNotServedError.
        """
        return await self._do(admin.queue_views.queue_of_model(await self._keys(), model))

    async def queue_of_request(self, request_id: str) -> str:
        """Returns the queue that knows the request; this client's queue if no queue knows it."""
        return await self._do(admin.queue_views.queue_of_request(await self._keys(), request_id))

    async def set_alias(self, alias: str, model: str) -> None:
        """Give a model the alias `alias`. Raises ConfigurationError."""
        await self._do(admin.queue_views.set_alias(await self._keys(), alias, model))

    async def forget_model(self, name: str) -> list[str]:
        """Forget an alias of a model, or a model that no worker serves. Returns its queues.

        Raises ModelNotServedError, and ConfigurationError if a queue of the model is still in use.
        """
        return await self._do(admin.queue_views.forget_model(await self._keys(), name))

    # API keys of the gateway

    async def create_api_key(
        self, key: admin.api_keys.ApiKey, weight: float | None = None
    ) -> tuple[str, admin.api_keys.ApiKey]:
        """Create a key of the gateway. Returns its secret, which is not stored, and the stored key.

        `weight` sets the weight of its tenant. Raises ConfigurationError if the name is taken, if
        two keys that should be separate would see each other's files, and for an unknown scope.
        """
        return await self._do(admin.api_keys.create_api_key(await self._keys(), key, weight))

    async def api_keys(self) -> list[admin.api_keys.ApiKey]:
        """The gateway's keys, sorted by name."""
        return await self._do(admin.api_keys.api_keys(await self._keys()))

    async def revoke_api_key(self, name: str) -> admin.api_keys.ApiKey:
        """Make a key invalid from now on. Raises RequestNotFoundError."""
        return await self._do(admin.api_keys.revoke_api_key(await self._keys(), name))

    # Streams

    def stream(
        self, request_id: str, *, from_index: int = 0, timeout: float | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yields events like `Client.stream`. To leave early, use `contextlib.aclosing`."""
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
        before the stream continues. Raises what `stream` and `handle` raise.
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
        """End every wait and close the connections, unless you passed the redis-py client."""
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
                assert self._redis is not None
                assert self._queue is not None
                finding = admin.queue_views.queue_of_model(self._queue.keys, self._model)
                with explained(self.url):
                    name = await heeding_cancels(carry_out_async(finding, self._queue.run))
                self._model, self._queue_name = None, name
                self._use(self._redis)
        return self.queue

    def _use(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._queue = AsyncRequestQueue(client, self._queue_name)
        self._subscriptions = Subscriptions(self._queue.redis)

    async def _keys(self) -> Keys:
        return (await self._connected()).keys

    async def _do(self, steps: Call[T] | Operation[T]) -> T:
        """Send a call, or carry out an operation."""
        queue = await self._connected()
        with explained(self.url):
            if isinstance(steps, Call):
                return await heeding_cancels(queue.run(steps))
            return await carry_out_async(steps, lambda step: heeding_cancels(queue.run(step)))

    async def _enqueue(self, new: list[NewRequest]) -> list[str]:
        queue = await self._connected()
        with explained(self.url), enqueueing(self._tracing, queue.keys.queue, new) as traced:
            return await heeding_cancels(queue.enqueue(traced))

    async def _read(self, request_id: str, timeout: float | None) -> list[TokenEvent]:
        """Read a whole stream."""
        events: list[TokenEvent] = []
        await self.follow(request_id, events.append, timeout=timeout)
        return events

    def _steps(self, request_id: str, from_index: int, timeout: float | None) -> Steps:
        keys = self.queue.keys
        return follow(keys, request_id, from_index, silence=self._silence, timeout=timeout)

    async def _carry_out(self, begin: Callable[[], GoOn[Any]]) -> AsyncGenerator[Any, None]:
        """Carry out a stream's actions, once the client is connected and knows its queue.

        Yields all other results of the function from `begin`, until it returns None.
        """
        await self._connected()
        go_on = begin()
        assert self._subscriptions is not None
        with explained(self.url):
            async with aclosing(Mailbox(self._subscriptions)) as mailbox:
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
