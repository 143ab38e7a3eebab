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
from promptq.producer.clients.results import Embeddings, Samples, checked_vector, countdown, fold
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
from promptq.shared.queue import lookups, places, request_queue, scripts, statistics
from promptq.shared.queue.call import Call, Operation, carry_out_async
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.tasks import heeding_cancels
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.runtime.turns import SLICE_SECONDS, Turns
from promptq.shared.server.connection import open_async_redis

T = TypeVar("T")


class AsyncClient:
    """`promptq.Client` for asyncio. The methods are coroutines that raise the same errors.

    `follow` is an additional method, for many streams.

    The client connects at the first call, or on entering `async with`. Any number of tasks may use
    the client in parallel. At most 32 calls run at a time, and further calls wait. All streams use
    one connection. If you pass a redis-py client, calls use at most half of its connections
    (`max_connections`, by default 100). If several clients share one redis-py client, each of them
    may need 33 connections.
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
        """Lets streams take turns when they deliver or parse much at once."""
        if isinstance(server, redis.asyncio.Redis):
            check_replies_are_bytes(server.connection_pool)
            self.url = address_of(server.connection_pool)
            self._use(server)
        else:
            self.url = server_url(server)

    @property
    def queue(self) -> AsyncRequestQueue:
        """The request queue, for operations that the client has no method for.

        A client made from a URL has its queue only after connecting, such as in `async with`.
        Before, raises RedisUnavailableError.
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

        `prompt` is text or token ids. `messages` is a chat, which the model's chat template
        renders. A picture in it may be bytes or a `pathlib.Path` instead of a URL. `fields` are
        those of `promptq.shared.protocol.request.Request` (`max_tokens`, `temperature`,
        `priority`, ...). The request waits at least `delay_ms` milliseconds.

        Raises InvalidRequestError, RequestExistsError, QueueFullError, and with `deadline_policy`
        DeadlineRefusedError. If the reply is lost, the client sends the request again, and the
        server accepts only one. If the server stays away, the request may or may not have arrived.
        An `idempotency_key` makes repeated calls safe.

        With `durability="replicated"`, the call waits until all connected replicas have the
        request. If a replica is too slow, or no replica exists, raises NotReplicatedError. If you
        then repeat the call with the same `request_id` and fields, it returns the same id.
        """
        request = call_fields(prompt, messages, request_id, delay_ms, fields)
        [own_id] = await self.enqueue_many([request])
        return own_id

    async def enqueue_many(self, requests: Iterable[Mapping[str, Any]]) -> list[str]:
        """Enqueue several requests, either all of them or none. Returns their ids.

        Each request is a mapping of the arguments of `enqueue`, such as `{"prompt": "Once"}`.
        Raises the errors of `enqueue`.
        """
        return await self.enqueue_composed(compose(requests))

    async def enqueue_composed(self, new: list[NewRequest]) -> list[str]:
        """Enqueues all requests that `request_builder.compose` made, or none. Returns their ids."""
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
        """Enqueue `n` requests with one prompt, all or none. Returns the ids `ID:0` ... `ID:n-1`.

        If `seed` is set, the seed of request `i` is `seed + i`. Raises the errors of `enqueue`.
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
        """Enqueue a request that continues another request (the source) after `at` tokens.

        The source, `request_id`, may still run or have ended. Without `at`, the fork continues
        after all of the source's tokens. The fork's output begins with these tokens and the text
        `append`. If the worker that runs the fork has the prompt and these tokens in its prefix
        cache, computing them costs little. Returns the new id: `fork_id`, or a UUIDv7. The fork has
        the source's payload without its seed and idempotency key. `changes` are further fields,
        such as `temperature`. `max_tokens` counts neither these tokens nor `append`.

        Raises InvalidRequestError, also for an `at` beyond the source's tokens. Raises
        RequestNotFoundError if the source is unknown or has expired, and the errors of `enqueue`.
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

        The result of a cancelled or expired request has its tokens so far. Raises
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
        """Enqueue a request, and wait for its result as `result` does.

        The request continues if you stop waiting. Raises the errors of `enqueue` and `result`.
        """
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
        """Enqueue `n` requests with one prompt. Wait up to `timeout` seconds for all results.

        Raises the errors of `enqueue` and `result`.
        """
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
        query: str | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> Embeddings:
        """Turn one text or several into vectors. All texts are enqueued, or none.

        A text may be token ids. `pooling` is `last` (the last token's hidden state), `mean` (of all
        tokens) or the worker's default. `dimensions` is the number of components to keep of each
        vector. `query`: see `rerank`. `fields` are as in `enqueue`; fields for generation have no
        effect. `timeout` (seconds) is for all texts together.

        Raises the errors of `enqueue` and `result`, and RequestFailedError if a vector is missing.
        """
        options = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
        embed = {**options, "query": query}
        new = compose_embeddings(texts, {**fields, "embed": embed})
        request_ids = await self.enqueue_composed(new)
        left = countdown(timeout)
        results = [await self.result(each, timeout=left()) for each in request_ids]
        return Embeddings(request_ids, list(map(checked_vector, request_ids, results)))

    async def rerank(self, query: str, documents: Sequence[str], **options: Any) -> list[float]:
        """Returns a score for each document: a document that answers the query better scores
        higher. `options` and errors are those of `embed`."""
        found = await self.embed(documents, query=query, **options)
        return [score for (score,) in found.vectors]

    # One request

    async def cancel(self, request_id: str) -> CancelStatus:
        """End a request: immediately if it waits, at the worker's next step if it runs.

        Returns a status, such as `unknown` for an unknown request.
        """
        [status] = await self._do(scripts.cancel([check_request_id(request_id)]))
        return status

    async def reprioritise(self, request_id: str, priority: int) -> PriorityStatus:
        """Change the priority of a waiting request. Returns a status.

        The request moves in the queue as if it had been enqueued with this priority. A request that
        a worker holds keeps its priority. Raises InvalidRequestError.
        """
        return await self._do(
            admin.queue_control.reprioritise(await self._keys(), request_id, priority)
        )

    async def state(self, request_id: str) -> RequestState | None:
        """Returns the state of a request; None if the request is unknown."""
        return await self._do(lookups.state(await self._keys(), check_request_id(request_id)))

    async def place(self, request_id: str) -> places.Place:
        """Returns how many requests wait in front of a request, and when it will start.

        Raises RequestNotFoundError.
        """
        return await self._do(places.place(await self._keys(), request_id))

    async def quote(self, payload: Mapping[str, Any]) -> places.Quote:
        """Returns when a request would start and end if it were enqueued now.

        `payload` has the arguments of `enqueue`. Raises InvalidRequestError.
        """
        return await self.quote_composed(compose([payload]))

    async def quote_composed(self, new: list[NewRequest]) -> places.Quote:
        """Returns the quote of the last of `new`, as if one call enqueued all requests in `new`."""
        return await self._do(places.quote(new))

    async def timeline(self, request_id: str) -> admin.timeline.Timeline:
        """Returns what happened to a request, in order of time. Raises RequestNotFoundError."""
        return await self._do(admin.timeline.timeline(await self._keys(), request_id))

    # The queue and its workers

    async def stats(self) -> admin.queue_stats.QueueStats:
        """Returns the numbers of requests by state, and the workers' last heartbeats."""
        return await self._do(admin.queue_stats.stats(await self._keys()))

    async def overview(self) -> admin.overview.Overview:
        """Returns the state of the queue and its workers, with the latest statistics."""
        return await self._do(admin.overview.overview(await self._keys()))

    async def worker(self, worker_id: str) -> admin.overview.WorkerView:
        """Returns a worker and its batch. Raises RequestNotFoundError if the worker is gone."""
        return await self._do(admin.overview.worker(await self._keys(), worker_id))

    async def statistics(self, since_ms: int = 0) -> list[Sample]:
        """Returns the samples of the statistics since `since_ms` (Unix milliseconds of the server).

        There is one sample for each 5 s of the last hour, oldest first.
        """
        return await self._do(statistics.samples(await self._keys(), since_ms))

    async def keep_statistics(self) -> None:
        """Write a sample of the statistics if one is due.

        Workers write samples, too. Call this regularly if there may be no worker.
        """
        await self._do(statistics.sample(statistics.Contribution()))

    async def scaling(self, target_seconds: float = TARGET_SECONDS) -> admin.autoscaling.Scaling:
        """Returns how many workers the queue needs to keep waits within `target_seconds`.

        Raises ConfigurationError if `target_seconds` is not above 0.
        """
        return await self._do(admin.autoscaling.scaling(await self._keys(), target_seconds))

    async def scalings(
        self, target_seconds: float = TARGET_SECONDS
    ) -> list[admin.autoscaling.Scaling]:
        """Returns a `scaling` for each of the server's queues that this Redis user may read."""
        return await self._do(admin.autoscaling.scalings(await self._keys(), target_seconds))

    async def pause(self) -> None:
        """Stop handing out requests. The queue accepts new requests; running requests finish."""
        await self._do(scripts.set_paused(await self._keys(), True))

    async def resume(self) -> None:
        """End a pause, so that requests are handed out again."""
        await self._do(admin.queue_control.resume(await self._keys()))

    async def drain(self, worker_id: str | None = None) -> list[str]:
        """Drain one worker, or all: they finish requests and exit. Returns the workers' ids."""
        return await self._do(admin.queue_control.drain(await self._keys(), worker_id))

    # Dead letters

    async def dead_ids(self, limit: int = 100) -> list[str]:
        """Returns the ids of dead letters, the latest first."""
        return await self._do(lookups.dead_ids(await self._keys(), limit))

    async def dead_letters(self, limit: int = 100) -> list[admin.dead_letters.DeadLetter]:
        """Returns the dead letters (requests given up after crashes), the latest first."""
        return await self._do(admin.dead_letters.dead_letters(await self._keys(), limit))

    async def dead_letter(self, request_id: str) -> admin.dead_letters.DeadLetter:
        """Returns one dead letter. Raises RequestNotFoundError."""
        return await self._do(admin.dead_letters.dead_letter(await self._keys(), request_id))

    async def requeue(self, request_id: str) -> str:
        """Enqueue a dead letter again. Returns the new id. Raises RequestNotFoundError."""
        return await self._do(request_queue.requeue(request_id))

    async def purge(self, request_ids: Sequence[str]) -> int:
        """Delete dead letters, and return the number of deletions."""
        statuses = await self._do(scripts.purge(request_ids)) if request_ids else []
        return statuses.count("purged")

    # Models and their queues

    async def models(self) -> list[admin.queue_views.ServedModel]:
        """Returns the models of all queues of the server, sorted by name."""
        return await self._do(admin.queue_views.models(await self._keys()))

    async def queue_of_model(self, model: str) -> str:
        """Returns the queue that serves a model. `model` is the model's name or an alias.

        If several queues do, returns the one with the fewest requests per worker. Raises
        ModelNotServedError.
        """
        return await self._do(admin.queue_views.queue_of_model(await self._keys(), model))

    async def queue_of_request(self, request_id: str) -> str:
        """Returns the queue that has the request; this client's queue if no queue has it."""
        return await self._do(admin.queue_views.queue_of_request(await self._keys(), request_id))

    async def set_alias(self, alias: str, model: str) -> None:
        """Set an alias of a model.

        Raises ConfigurationError if the alias is not valid, or is the name of a model. Raises
        ModelNotServedError if no queue has the model.
        """
        await self._do(admin.queue_views.set_alias(await self._keys(), alias, model))

    async def forget_model(self, name: str) -> list[str]:
        """Delete an alias, or a model that no worker serves. Returns the model's queues.

        Raises ModelNotServedError for an unknown name, ConfigurationError if a queue is in use.
        """
        return await self._do(admin.queue_views.forget_model(await self._keys(), name))

    # API keys of the gateway

    async def create_api_key(
        self, key: admin.api_keys.ApiKey, weight: float | None = None
    ) -> tuple[str, admin.api_keys.ApiKey]:
        """Create a key of the gateway. Returns its secret, which is not stored, and the stored key.

        `weight` is the new weight of the key's tenant. Raises ConfigurationError if the name is
        taken or a scope is unknown. A key without a tenant uses its name as tenant. If another key
        has this tenant, raises ConfigurationError, too.
        """
        return await self._do(admin.api_keys.create_api_key(await self._keys(), key, weight))

    async def api_keys(self) -> list[admin.api_keys.ApiKey]:
        """Returns the gateway's keys, sorted by name."""
        return await self._do(admin.api_keys.api_keys(await self._keys()))

    async def revoke_api_key(self, name: str) -> admin.api_keys.ApiKey:
        """Make a key invalid immediately. Returns the key. Raises RequestNotFoundError."""
        return await self._do(admin.api_keys.revoke_api_key(await self._keys(), name))

    # Streams

    def stream(
        self, request_id: str, *, from_index: int = 0, timeout: float | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yields events like `Client.stream`. To stop reading early, use `contextlib.aclosing`."""
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
        """Call `handle` with each event of a stream as soon as the event arrives.

        With `stream`, each event wakes up a task. With hundreds of streams, this costs more than
        the events themselves. With `follow`, no task wakes up, but all streams of the client wait
        while `handle` runs. For work that takes time, `handle` returns a function. The client calls
        and awaits this function before the stream continues. Raises the errors of `stream` and of
        `handle`.
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
                    if time.perf_counter() > until:  # a log may have many events
                        return self.turns.give_way
                    action = advance(steps, None)
                return action

            return go_on

        async with aclosing(self._carry_out(begin)) as all_unfinished:
            async for finish in all_unfinished:
                await finish()

    async def close(self) -> None:
        """End every wait and close the connections, except a redis-py client that you passed."""
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
        events: list[TokenEvent] = []
        await self.follow(request_id, events.append, timeout=timeout)
        return events

    def _steps(self, request_id: str, from_index: int, timeout: float | None) -> Steps:
        keys = self.queue.keys
        return follow(keys, request_id, from_index, silence=self._silence, timeout=timeout)

    async def _carry_out(self, begin: Callable[[], GoOn[Any]]) -> AsyncGenerator[Any, None]:
        """Connects the client if needed, and carries out a stream's actions.

        `begin` returns a function that takes the answer to an action and returns the next action. A
        value that is no action is yielded. The stream ends when the function returns None.
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
