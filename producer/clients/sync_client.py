"""The synchronous client: enqueue, stream, result, cancel."""

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
    heard,
)
from promptq.producer.clients.tracing import enqueueing
from promptq.shared.errors import PromptqError, RedisUnavailableError
from promptq.shared.protocol.events import Result, TokenEvent
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.protocol.replies import CancelStatus, PriorityStatus
from promptq.shared.protocol.request import NewRequest, Pooling, RequestState
from promptq.shared.protocol.worker_stats import Sample
from promptq.shared.queue import lookups, request_queue, scripts, statistics
from promptq.shared.queue.call import Call, Operation, carry_out
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.server.connection import open_redis

T = TypeVar("T")


class Client:
    """Puts requests into a queue and reads their streams.

    Thread-safe: any number of threads may use one client. A thread that reads a stream keeps a
    connection, and each call takes another one while it lasts. A redis-py client that you pass must
    allow as many connections (its `max_connections`, by default 100).

    `server` is a URL or a redis-py client, which you close yourself. By default it is the server
    of PROMPTQ_REDIS_URL, or of the `promptq up` that runs on this machine. Use the client as a
    context manager, or call `close`. With `tracing` (see `promptq.shared.runtime.tracing`) each
    request gets a span, the parent of its worker's spans.

    Instead of a `queue` you may name a `model`: the client then uses the queue that serves it, or,
    of several, the one with the fewest requests for each worker. Only the queue that a request was
    sent to knows the request (`client.queue.keys.queue`).

    Raises RedisUnavailableError, RedisAuthError, RedisTooOldError, ConfigurationError,
    ModelNotServedError. Every method raises the first three too when the server goes away.
    """

    queue: RequestQueue
    """The queue itself, for operations that the client has no method for."""

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
            self._redis: Any = server  # its command methods are untyped
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

        `prompt` is text or token ids; `messages` goes through the model's chat template; `fields`
        are those of `promptq.shared.protocol.request.Request` (`max_tokens`, `temperature`,
        `priority`, ...). With `delay_ms` the request waits at least that long.

        Raises InvalidRequestError, RequestExistsError, QueueFullError. If the reply gets lost, the
        request is sent again, and the server recognises it. If the server stays away, nobody can
        say whether the request arrived; with an `idempotency_key` it is safe to repeat the call.
        """
        request = call_fields(prompt, messages, request_id, delay_ms, fields)
        [own_id] = self.enqueue_many([request])
        return own_id

    def enqueue_many(self, requests: Iterable[Mapping[str, Any]]) -> list[str]:
        """Enqueue requests, all or none. Returns their ids.

        Each request is a mapping of the arguments of `enqueue`: `{"prompt": "Once", "max_tokens":
        8}`.
        """
        return self.enqueue_composed(compose(requests))

    def enqueue_composed(self, new: list[NewRequest]) -> list[str]:
        """Like `enqueue_many`, for requests that `request_builder.compose` made."""
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
        """Enqueue `n` requests with the same prompt, all or none.

        Their ids are `ID:0` ... `ID:n-1`. If `seed` is given, their seeds are `seed + i`.
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
        source = self._do(fork_source(self._keys(), check_request_id(request_id)))
        own = {**changes, "request_id": fork_id, "delay_ms": delay_ms}
        [own_id] = self.enqueue_composed([source.compose_fork(at, append, own)])
        return own_id

    def result(
        self, request_id: str, *, timeout: float | None = None, check: bool = True
    ) -> Result:
        """Wait for the request to end and return its whole result.

        The result of a cancelled or expired request holds its tokens so far. Raises
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
        """Enqueue a request and return its result. The request continues if you stop waiting."""
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
        """Enqueue samples and return the results of all; `timeout` is for all together."""
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
        request_ids = self.enqueue_composed(new)
        left = countdown(timeout)
        results = [self.result(each, timeout=left()) for each in request_ids]
        return Embeddings(request_ids, list(map(checked_vector, request_ids, results)))

    # One request

    def cancel(self, request_id: str) -> CancelStatus:
        """End a request: at once if it waits, at its worker's next step if it runs."""
        [status] = self._do(scripts.cancel([check_request_id(request_id)]))
        return status

    def reprioritise(self, request_id: str, priority: int) -> PriorityStatus:
        """Move a waiting request to the place of requests that were enqueued with this priority.

        Returns a status: a request that a worker holds does not change. Raises InvalidRequestError.
        """
        return self._do(admin.queue_control.reprioritise(self._keys(), request_id, priority))

    def state(self, request_id: str) -> RequestState | None:
        """Returns the state of a request; None if it is unknown."""
        return self._do(lookups.state(self._keys(), check_request_id(request_id)))

    def timeline(self, request_id: str) -> admin.timeline.Timeline:
        """Returns what happened to a request, and when. Raises RequestNotFoundError."""
        return self._do(admin.timeline.timeline(self._keys(), request_id))

    # The queue and its workers

    def stats(self) -> admin.queue_stats.QueueStats:
        """Returns the numbers of requests by state, and the workers' last heartbeats."""
        return self._do(admin.queue_stats.stats(self._keys()))

    def overview(self) -> admin.overview.Overview:
        """Returns the state of the queue and its workers, with the latest statistics."""
        return self._do(admin.overview.overview(self._keys()))

    def worker(self, worker_id: str) -> admin.overview.WorkerView:
        """A worker and its batch as it is now. Raises RequestNotFoundError for one that is gone."""
        return self._do(admin.overview.worker(self._keys(), worker_id))

    def statistics(self, since_ms: int = 0) -> list[Sample]:
        """Samples of the queue's statistics from `since_ms` (Unix milliseconds of the server) on.

        There is one for each 5 s of the last hour. The oldest comes first.
        """
        return self._do(statistics.samples(self._keys(), since_ms))

    def keep_statistics(self) -> None:
        """Take a sample if one is due. Call this every few seconds if all workers may be away."""
        self._do(statistics.sample(statistics.Contribution()))

    def scaling(self, target_seconds: float = TARGET_SECONDS) -> admin.autoscaling.Scaling:
        """Returns the workers that the queue needs to keep waits below `target_seconds`."""
        return self._do(admin.autoscaling.scaling(self._keys(), target_seconds))

    def scalings(self, target_seconds: float = TARGET_SECONDS) -> list[admin.autoscaling.Scaling]:
        """Returns the scaling of all readable queues of the server."""
        return self._do(admin.autoscaling.scalings(self._keys(), target_seconds))

    def pause(self) -> None:
        """Stop handing out requests. New ones are accepted and wait; running ones finish."""
        self._do(scripts.set_paused(self._keys(), True))

    def resume(self) -> None:
        """Hand out requests again after `pause`."""
        self._do(admin.queue_control.resume(self._keys()))

    def drain(self, worker_id: str | None = None) -> list[str]:
        """Make all workers, or one, claim no more, finish their requests and exit. Returns the
        workers' ids."""
        return self._do(admin.queue_control.drain(self._keys(), worker_id))

    # Dead letters

    def dead_ids(self, limit: int = 100) -> list[str]:
        """Ids of dead letters, the latest first."""
        return self._do(lookups.dead_ids(self._keys(), limit))

    def dead_letters(self, limit: int = 100) -> list[admin.dead_letters.DeadLetter]:
        """Requests that were given up because they crash their workers, the latest first."""
        return self._do(admin.dead_letters.dead_letters(self._keys(), limit))

    def dead_letter(self, request_id: str) -> admin.dead_letters.DeadLetter:
        """One dead letter. Raises RequestNotFoundError."""
        return self._do(admin.dead_letters.dead_letter(self._keys(), request_id))

    def requeue(self, request_id: str) -> str:
        """Run a dead letter again; return the new request's id. Raises RequestNotFoundError."""
        return self._do(request_queue.requeue(request_id))

    def purge(self, request_ids: Sequence[str]) -> int:
        """Delete dead letters; return the number of deleted ones."""
        statuses = self._do(scripts.purge(request_ids)) if request_ids else []
        return statuses.count("purged")

    # Models and their queues

    def models(self) -> list[admin.queue_views.ServedModel]:
        """The models of all queues of the server, by name. A queue without a model is left out."""
        return self._do(admin.queue_views.models(self._keys()))

    def queue_of_model(self, model: str) -> str:
        """Returns the queue that serves a model, by its name or an alias.

        If several serve it, returns the one with the fewest requests for each worker. Raises
        ModelNotServedError.
        """
        return self._do(admin.queue_views.queue_of_model(self._keys(), model))

    def queue_of_request(self, request_id: str) -> str:
        """Returns the queue that knows the request; this client's queue if no queue knows it."""
        return self._do(admin.queue_views.queue_of_request(self._keys(), request_id))

    def set_alias(self, alias: str, model: str) -> None:
        """Give a model the alias `alias`. Raises ConfigurationError."""
        self._do(admin.queue_views.set_alias(self._keys(), alias, model))

    def forget_model(self, name: str) -> list[str]:
        """Forget an alias of a model, or a model that no worker serves. Returns its queues.

        Raises ModelNotServedError, and ConfigurationError if a queue of the model is still in use.
        """
        return self._do(admin.queue_views.forget_model(self._keys(), name))

    # API keys of the gateway

    def create_api_key(
        self, key: admin.api_keys.ApiKey, weight: float | None = None
    ) -> tuple[str, admin.api_keys.ApiKey]:
        """Create a key of the gateway. Returns its secret, which is not stored, and the stored key.

        `weight` sets the weight of its tenant. Raises ConfigurationError if the name is taken, if
        two keys that should be separate would see each other's files, and for an unknown scope.
        """
        return self._do(admin.api_keys.create_api_key(self._keys(), key, weight))

    def api_keys(self) -> list[admin.api_keys.ApiKey]:
        """The gateway's keys, sorted by name."""
        return self._do(admin.api_keys.api_keys(self._keys()))

    def revoke_api_key(self, name: str) -> admin.api_keys.ApiKey:
        """Make a key invalid from now on. Raises RequestNotFoundError."""
        return self._do(admin.api_keys.revoke_api_key(self._keys(), name))

    # Streams

    def stream(
        self, request_id: str, *, from_index: int = 0, timeout: float | None = None
    ) -> Iterator[TokenEvent]:
        """Yields the events of a request, from the first to the last, each once and in order.

        You may read a stream at any time, even after its end. With `from_index` the stream begins
        with the event that holds that token. A lost connection is opened again. If the request
        fails, its last event holds the error, which is not raised.

        Raises RequestNotFoundError, TimeoutError if the end has not come after `timeout` seconds,
        and StreamChangedError if the server lost delivered tokens and others replaced them.
        """
        keys = self.queue.keys
        check_request_id(request_id)
        steps = follow(keys, request_id, from_index, silence=self._silence, timeout=timeout)
        return self._carry_out(steps)

    def close(self) -> None:
        """End every wait and close the connections, unless you passed the redis-py client."""
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
        """Send a call, or carry out an operation."""
        with explained(self.url):
            if isinstance(steps, Call):
                return self.queue.run(steps)
            return carry_out(steps, self.queue.run)

    def _enqueue(self, new: list[NewRequest]) -> list[str]:
        with (
            explained(self.url),
            enqueueing(self._tracing, self.queue.keys.queue, new) as traced,
        ):
            return self.queue.enqueue(traced)

    def _read(self, request_id: str, timeout: float | None) -> list[TokenEvent]:
        """Read a whole stream."""
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
