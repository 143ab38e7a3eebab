"""The synchronous client: enqueue, stream, result, cancel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import redis

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
    heard,
)
from promptq.producer.clients.tracing import enqueueing
from promptq.shared.errors import PromptqError, RedisUnavailableError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.queue.call import Operation, carry_out
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.server.connection import open_redis

P = ParamSpec("P")
T = TypeVar("T")


def _method(
    operation: Callable[Concatenate[Keys, P], Operation[T]],
) -> Callable[Concatenate[Client, P], T]:
    """The method of a client that carries out an operation."""

    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with explained(client.url):
            return carry_out(operation(client.queue.keys, *args, **kwargs), client._take)

    return as_method(method, operation)


class Client:
    """Puts requests into a queue and reads their streams.

    Thread-safe: any number of threads may use one client. A thread that reads a stream keeps a
    connection, and each call takes another one while it lasts. If you give it a redis-py client,
    that client must allow so many connections (its `max_connections`, by default 100).

    `server` is a URL or a redis-py client, which you close yourself. By default it is the server
    of PROMPTQ_REDIS_URL, or of the `promptq up` that runs on this machine. Use the client as a
    context manager, or call `close`. With `tracing` (see `promptq.shared.runtime.tracing`) each
    request gets a span, and its worker's spans are children of that span.

    Instead of a `queue` you may name a `model`: the client then uses the queue that serves it, or,
    of several, the one with the fewest requests for each worker. A request is known in the queue
    that it was sent to (`client.queue.keys.queue`).

    Raises RedisUnavailableError, RedisAuthError, RedisTooOldError, ConfigurationError,
    ModelNotServedError. Every method raises the first three too when the server goes away. Most
    methods are described in `promptq.producer.clients.operations`.
    """

    queue: RequestQueue
    """The queue itself, for what the client has no method for."""

    def __init__(
        self,
        server: str | redis.Redis | None = None,
        queue: str | None = None,
        *,
        model: str | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        tracing: Tracing | None = None,
    ) -> None:
        if model is not None:
            check_is_alone(model, queue)
        self._owned: redis.Redis | None = None
        if isinstance(server, redis.Redis):
            check_replies_are_bytes(server.connection_pool)
            self.url = address_of(server.connection_pool)
            self._redis: Any = server  # its command methods are untyped
        else:
            self.url = server_url(server)
            try:
                self._redis = self._owned = open_redis(self.url)
            except RedisUnavailableError as error:
                raise without_server(error) from error
        self.queue = RequestQueue(self._redis, DEFAULT_QUEUE if queue is None else queue)
        if model is not None:
            finding = operations.queue_of_model(self.queue.keys, model)
            try:
                with explained(self.url):
                    self.queue = RequestQueue(self._redis, carry_out(finding, self.queue.run))
            except PromptqError:
                self.close()
                raise
        self._silence = silence_seconds
        self._tracing = tracing

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
    ) -> Iterator[TokenEvent]:
        """The events of a request, from the first to the last, each once and in order.

        You may read a stream at any time, even after its end. With `from_index` it begins with the
        event that holds that token. A lost connection is opened again. If the request fails, the
        error is in its last event and is not raised.

        Raises RequestNotFoundError, TimeoutError if the end has not come after `timeout` seconds,
        and StreamChangedError if the server lost tokens that were read and other ones replaced
        them.
        """
        keys = self.queue.keys
        return self._carry_out(
            follow(
                keys,
                check_request_id(request_id),
                from_index,
                silence=self._silence,
                timeout=timeout,
            )
        )

    def close(self) -> None:
        """End every wait and close the connections, unless the redis-py client was given."""
        self.queue.close()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, step: Any) -> Any:
        """Take one step of an operation."""
        match step:
            case Enqueue(new):
                with enqueueing(self._tracing, self.queue.keys.queue, new) as traced:
                    return self.queue.enqueue(traced)
            case ReadToEnd(request_id, timeout):
                return list(self.stream(request_id, timeout=timeout))
        return self.queue.run(step)

    def _carry_out(self, steps: Steps) -> Iterator[TokenEvent]:
        with explained(self.url), closing(self.queue.redis.pubsub()) as subscription:
            action = advance(steps, None)
            while action is not None:
                answer = None
                if isinstance(action, TokenEvent):
                    yield action
                else:
                    answer = self._perform(action, subscription)
                action = advance(steps, answer)

    def _perform(self, action: Action, subscription: Any) -> Any:
        try:
            match action:
                case Ask(call):
                    return self.queue.run(call)
                case Wait(seconds):
                    return heard(subscription.get_message(timeout=seconds))
                case Sleep(seconds):
                    time.sleep(seconds)
                case Subscribe(channel, sharded):
                    subscription.close()
                    (subscription.ssubscribe if sharded else subscription.subscribe)(channel)
        except redis.RedisError as error:
            return error
