"""The synchronous client: it enqueues requests, streams tokens and returns results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Self, TypeVar

import redis

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
    heard,
)
from promptq.producer.clients.tracing import enqueueing
from promptq.shared.errors import PromptqError, RedisUnavailableError
from promptq.shared.protocol.events import Result, TokenEvent
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.protocol.replies import CancelStatus, PriorityStatus
from promptq.shared.protocol.request import NewRequest, Pooling, RequestState
from promptq.shared.protocol.worker_stats import Sample
from promptq.shared.queue import lookups, places, request_queue, scripts, statistics
from promptq.shared.queue.call import Call, Operation, carry_out
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.server.connection import open_redis

T = TypeVar("T")


class Client:
    """Puts requests into a queue and reads their streams.

    Thread-safe: any number of threads may use one client. A thread that reads a stream uses one
    connection, and each call uses another connection until the call returns. If you pass a redis-py
    client, its `max_connections` (by default 100) must allow all these connections.

    `server` is a URL or a redis-py client. You must close such a redis-py client yourself. The
    default is the server of PROMPTQ_REDIS_URL, or of the `promptq up` that runs on this machine.
    Use the client as a context manager, or call `close`. With `tracing` (see
    `promptq.shared.runtime.tracing`) each request gets a span, the parent of its worker's spans.

    Instead of a `queue` you may name a `model`. Then the client uses the queue that serves the
    model. If several queues do, it uses the one with the fewest requests per worker. No other queue
    knows this client's requests; `client.queue.keys.queue` is the queue's name.

    Raises RedisUnavailableError, RedisAuthError, RedisTooOldError, ConfigurationError,
    ModelNotServedError. When the server goes away, all methods may raise the first three.
    """

    queue: RequestQueue
    """The request queue, for operations for which the client has no method."""

    def __init__(
        self,
        server: str | redis.Redis | None = None,
        queue: str | None = None,
        *,
        model: str | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        tracing: Tracing | None = None,
    ) -> None:
        check_one_of(model, queue)
        self._owned: redis.Redis | None = None
        if isinstance(server, redis.Redis):
            check_replies_are_bytes(server.connection_pool)
            self.url = address_of(server.connection_pool)
            self._redis: Any = server  # redis-py's command methods are untyped
        else:
            self.url = server_url(server)
            try:
                self._redis = self._owned = open_redis(self.url)
            except RedisUnavailableError as error:
                raise without_server(error) from error
        self.queue = RequestQueue(self._redis, DEFAULT_QUEUE if queue is None else queue)
        if model is not None:
            try:
                self.queue = RequestQueue(self._redis, self.queue_of_model(model))
            except PromptqError:
                self.close()
                raise
        self._silence = silence_seconds
        self._tracing = tracing

    # Enqueue requests, read what comes back

    def enqueue(
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
        [own_id] = self.enqueue_many([request])
        return own_id

    def enqueue_many(self, requests: Iterable[Mapping[str, Any]]) -> list[str]:
        """Enqueue several requests, either all of them or none. Returns their ids.

        Each request is a mapping of the arguments of `enqueue`, such as `{"prompt": "Once"}`.
        Raises the errors of `enqueue`.
        """
        return self.enqueue_composed(compose(requests))

    def enqueue_composed(self, new: list[NewRequest]) -> list[str]:
        """Enqueues all requests that `request_builder.compose` made, or none. Returns their ids."""
        return self._enqueue(new) if new else []

    def enqueue_samples(
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
        return self.enqueue_composed(compose_samples(n, request))

    def fork(
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
        source = self._do(fork_source(self._keys(), check_request_id(request_id)))
        own = {**changes, "request_id": fork_id, "delay_ms": delay_ms}
        [own_id] = self.enqueue_composed([source.compose_fork(at, append, own)])
        return own_id

    def result(
        self, request_id: str, *, timeout: float | None = None, check: bool = True
    ) -> Result:
        """Wait for the request to end and return its whole result.

        The result of a cancelled or expired request has its tokens so far. Raises
        RequestFailedError if the request ended with an error, unless `check` is false. Raises
        TimeoutError after `timeout` seconds; the request then continues, unless you call `cancel`.
        Raises RequestNotFoundError and StreamChangedError like `stream`.
        """
        return fold(request_id, self._read(request_id, timeout), check)

    def generate(
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
        request_id = self.enqueue(prompt, **fields)
        return self.result(request_id, timeout=timeout, check=check)

    def sample(
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
        request_ids = self.enqueue_samples(n, prompt, **fields)
        left = countdown(timeout)
        results = [self.result(each, timeout=left(), check=check) for each in request_ids]
        return Samples(request_ids, results)

    def embed(
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
        request_ids = self.enqueue_composed(new)
        left = countdown(timeout)
        results = [self.result(each, timeout=left()) for each in request_ids]
        return Embeddings(request_ids, list(map(checked_vector, request_ids, results)))

    def rerank(self, query: str, documents: Sequence[str], **options: Any) -> list[float]:
        """Returns a score for each document: a document that answers the query better scores
        higher. `options` and errors are those of `embed`."""
        found = self.embed(documents, query=query, **options)
        return [score for (score,) in found.vectors]

    # One request

    def cancel(self, request_id: str) -> CancelStatus:
        """End a request: immediately if it waits, at the worker's next step if it runs.

        Returns a status, such as `unknown` for an unknown request.
        """
        [status] = self._do(scripts.cancel([check_request_id(request_id)]))
        return status

    def reprioritise(self, request_id: str, priority: int) -> PriorityStatus:
        """Change the priority of a waiting request. Returns a status.

        The request moves in the queue as if it had been enqueued with this priority. A request that
        a worker holds keeps its priority. Raises InvalidRequestError.
        """
        return self._do(admin.queue_control.reprioritise(self._keys(), request_id, priority))

    def state(self, request_id: str) -> RequestState | None:
        """Returns the state of a request; None if the request is unknown."""
        return self._do(lookups.state(self._keys(), check_request_id(request_id)))

    def place(self, request_id: str) -> places.Place:
        """Returns how many requests wait in front of a request, and when it will start.

        Raises RequestNotFoundError.
        """
        return self._do(places.place(self._keys(), request_id))

    def quote(self, payload: Mapping[str, Any]) -> places.Quote:
        """Returns when a request would start and end if it were enqueued now.

        `payload` has the arguments of `enqueue`. Raises InvalidRequestError.
        """
        return self.quote_composed(compose([payload]))

    def quote_composed(self, new: list[NewRequest]) -> places.Quote:
        """Returns the quote of the last of `new`, as if one call enqueued all requests in `new`."""
        return self._do(places.quote(new))

    def timeline(self, request_id: str) -> admin.timeline.Timeline:
        """Returns what happened to a request, in order of time. Raises RequestNotFoundError."""
        return self._do(admin.timeline.timeline(self._keys(), request_id))

    # The queue and its workers

    def stats(self) -> admin.queue_stats.QueueStats:
        """Returns the numbers of requests by state, and the workers' last heartbeats."""
        return self._do(admin.queue_stats.stats(self._keys()))

    def overview(self) -> admin.overview.Overview:
        """Returns the state of the queue and its workers, with the latest statistics."""
        return self._do(admin.overview.overview(self._keys()))

    def worker(self, worker_id: str) -> admin.overview.WorkerView:
        """Returns a worker and its batch. Raises RequestNotFoundError if the worker is gone."""
        return self._do(admin.overview.worker(self._keys(), worker_id))

    def statistics(self, since_ms: int = 0) -> list[Sample]:
        """Returns the samples of the statistics since `since_ms` (Unix milliseconds of the server).

        There is one sample for each 5 s of the last hour, oldest first.
        """
        return self._do(statistics.samples(self._keys(), since_ms))

    def keep_statistics(self) -> None:
        """Write a sample of the statistics if one is due.

        Workers write samples, too. Call this regularly if there may be no worker.
        """
        self._do(statistics.sample(statistics.Contribution()))

    def scaling(self, target_seconds: float = TARGET_SECONDS) -> admin.autoscaling.Scaling:
        """Returns how many workers the queue needs to keep waits within `target_seconds`.

        Raises ConfigurationError if `target_seconds` is not above 0.
        """
        return self._do(admin.autoscaling.scaling(self._keys(), target_seconds))

    def scalings(self, target_seconds: float = TARGET_SECONDS) -> list[admin.autoscaling.Scaling]:
        """Returns a `scaling` for each of the server's queues that this Redis user may read."""
        return self._do(admin.autoscaling.scalings(self._keys(), target_seconds))

    def pause(self) -> None:
        """Stop handing out requests. The queue accepts new requests; running requests finish."""
        self._do(scripts.set_paused(self._keys(), True))

    def resume(self) -> None:
        """End a pause, so that requests are handed out again."""
        self._do(admin.queue_control.resume(self._keys()))

    def drain(self, worker_id: str | None = None) -> list[str]:
        """Drain one worker, or all: they finish requests and exit. Returns the workers' ids."""
        return self._do(admin.queue_control.drain(self._keys(), worker_id))

    # Dead letters

    def dead_ids(self, limit: int = 100) -> list[str]:
        """Returns the ids of dead letters, the latest first."""
        return self._do(lookups.dead_ids(self._keys(), limit))

    def dead_letters(self, limit: int = 100) -> list[admin.dead_letters.DeadLetter]:
        """Returns the dead letters (requests given up after crashes), the latest first."""
        return self._do(admin.dead_letters.dead_letters(self._keys(), limit))

    def dead_letter(self, request_id: str) -> admin.dead_letters.DeadLetter:
        """Returns one dead letter. Raises RequestNotFoundError."""
        return self._do(admin.dead_letters.dead_letter(self._keys(), request_id))

    def requeue(self, request_id: str) -> str:
        """Enqueue a dead letter again. Returns the new id. Raises RequestNotFoundError."""
        return self._do(request_queue.requeue(request_id))

    def purge(self, request_ids: Sequence[str]) -> int:
        """Delete dead letters, and return the number of deletions."""
        statuses = self._do(scripts.purge(request_ids)) if request_ids else []
        return statuses.count("purged")

    # Models and their queues

    def models(self) -> list[admin.queue_views.ServedModel]:
        """Returns the models of all queues of the server, sorted by name."""
        return self._do(admin.queue_views.models(self._keys()))

    def queue_of_model(self, model: str) -> str:
        """Returns the queue that serves a model. `model` is the model's name or an alias.

        If several queues do, returns the one with the fewest requests per worker. Raises
        ModelNotServedError.
        """
        return self._do(admin.queue_views.queue_of_model(self._keys(), model))

    def queue_of_request(self, request_id: str) -> str:
        """Returns the queue that has the request; this client's queue if no queue has it."""
        return self._do(admin.queue_views.queue_of_request(self._keys(), request_id))

    def set_alias(self, alias: str, model: str) -> None:
        """Set an alias of a model.

        Raises ConfigurationError if the alias is not valid, or is the name of a model. Raises
        ModelNotServedError if no queue has the model.
        """
        self._do(admin.queue_views.set_alias(self._keys(), alias, model))

    def forget_model(self, name: str) -> list[str]:
        """Delete an alias, or a model that no worker serves. Returns the model's queues.

        Raises ModelNotServedError for an unknown name, ConfigurationError if a queue is in use.
        """
        return self._do(admin.queue_views.forget_model(self._keys(), name))

    # API keys of the gateway

    def create_api_key(
        self, key: admin.api_keys.ApiKey, weight: float | None = None
    ) -> tuple[str, admin.api_keys.ApiKey]:
        """Create a key of the gateway. Returns its secret, which is not stored, and the stored key.

        `weight` is the new weight of the key's tenant. Raises ConfigurationError if the name is
        taken or a scope is unknown. A key without a tenant uses its name as tenant. If another key
        has this tenant, raises ConfigurationError, too.
        """
        return self._do(admin.api_keys.create_api_key(self._keys(), key, weight))

    def api_keys(self) -> list[admin.api_keys.ApiKey]:
        """Returns the gateway's keys, sorted by name."""
        return self._do(admin.api_keys.api_keys(self._keys()))

    def revoke_api_key(self, name: str) -> admin.api_keys.ApiKey:
        """Make a key invalid immediately. Returns the key. Raises RequestNotFoundError."""
        return self._do(admin.api_keys.revoke_api_key(self._keys(), name))

    # Streams

    def stream(
        self, request_id: str, *, from_index: int = 0, timeout: float | None = None
    ) -> Iterator[TokenEvent]:
        """Yields the events of a request, from the first to the last, each once and in order.

        You may read a stream at any time, even after the request's end. `from_index` is a token,
        counted from 0; the first event contains this token. After a lost connection, the stream
        reconnects. If the request fails, the last event has the error, and no error is raised.

        Raises RequestNotFoundError, TimeoutError after `timeout` seconds, and StreamChangedError if
        the server lost delivered tokens and sent other tokens in their place.
        """
        keys = self.queue.keys
        check_request_id(request_id)
        steps = follow(keys, request_id, from_index, silence=self._silence, timeout=timeout)
        return self._carry_out(steps)

    def close(self) -> None:
        """End every wait and close the connections, except a redis-py client that you passed."""
        self.queue.close()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keys(self) -> Keys:
        return self.queue.keys

    def _do(self, steps: Call[T] | Operation[T]) -> T:
        with explained(self.url):
            if isinstance(steps, Call):
                return self.queue.run(steps)
            return carry_out(steps, self.queue.run)

    def _enqueue(self, new: list[NewRequest]) -> list[str]:
        name = self.queue.keys.queue
        with explained(self.url), enqueueing(self._tracing, name, new) as traced:
            return self.queue.enqueue(traced)

    def _read(self, request_id: str, timeout: float | None) -> list[TokenEvent]:
        return list(self.stream(request_id, timeout=timeout))

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
