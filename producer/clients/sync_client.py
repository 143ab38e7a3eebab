"""The synchronous client: enqueue, stream, result, cancel."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Self, TypeVar

import redis

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
    heard,
)
from promptq.producer.clients.tracing import enqueueing
from promptq.shared.errors import RedisUnavailableError
from promptq.shared.protocol.events import Result, TokenEvent
from promptq.shared.protocol.keys import check_request_id
from promptq.shared.protocol.replies import CancelStatus, PriorityStatus
from promptq.shared.protocol.request import NewRequest, RequestState
from promptq.shared.protocol.worker_stats import Sample
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.server.connection import open_redis

T = TypeVar("T")


class Client:
    """Puts requests into a queue and reads their streams.

    Thread-safe: any number of threads may use one client. A thread that reads a stream keeps a
    connection, and any call takes another while it lasts. A redis-py client that is given has to
    allow as many (`max_connections`, 100 unless it says otherwise).

    `server` is a URL or a redis-py client (which stays its owner's to close); without one, the
    server of PROMPTQ_REDIS_URL or of the `promptq up` that runs on this machine. Use it as a
    context manager, or call `close`. With `tracing` (see `promptq.shared.runtime.tracing`) each
    request gets a span, of which its worker's spans are children.

    Raises RedisUnavailableError, RedisAuthError, RedisTooOldError, ConfigurationError; so does
    every method when the server goes away.
    """

    def __init__(
        self,
        server: str | redis.Redis | None = None,
        queue: str = "default",
        *,
        silence_seconds: float = SILENCE_SECONDS,
        tracing: Tracing | None = None,
    ) -> None:
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
        self._queue = RequestQueue(self._redis, queue)
        self._silence = silence_seconds
        self._tracing = tracing

    def enqueue(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        delay_ms: int = 0,
        **fields: Any,
    ) -> str:
        """Put one request in and give its id, a UUIDv7 unless `request_id` is given.

        `prompt` is text or token ids; `messages` goes through the model's chat template; `fields`
        are those of `promptq.shared.protocol.request.Request` (`max_tokens`, `temperature`,
        `priority`, ...). With `delay_ms` it waits at least so long.

        Raises InvalidRequestError, RequestExistsError, QueueFullError. When the reply gets lost,
        it is sent again and known by the server. If the server stays away, nobody can say whether
        it got through; an `idempotency_key` makes repeating safe.
        """
        return self.enqueue_many([call_fields(prompt, messages, request_id, delay_ms, fields)])[0]

    def enqueue_many(self, requests: Iterable[Mapping[str, Any]]) -> list[str]:
        """Put requests in, all or none, and give their ids.

        Each is a mapping of what `enqueue` takes: `{"prompt": "Once", "max_tokens": 8}`.
        """
        return self._enqueue(compose(requests))

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
        """Put `n` requests of one prompt in, all or none.

        Their ids are `ID:0` ... `ID:n-1`; where `seed` is given, theirs are `seed + i`.
        """
        return self._enqueue(
            compose_samples(n, call_fields(prompt, messages, request_id, delay_ms, fields))
        )

    def stream(
        self, request_id: str, *, from_index: int = 0, timeout: float | None = None
    ) -> Iterator[TokenEvent]:
        """The events of a request, from the first to the last, each once and in order.

        Subscribers may come at any time, also after the end. With `from_index` the stream begins
        with the event that holds that token. A connection that drops is opened again. An error of
        the request is its last event, not an exception.

        Raises RequestNotFoundError, TimeoutError if the end has not come after `timeout` seconds,
        StreamChangedError if the server lost what was read and has other tokens in its place.
        """
        return self._follow(request_id, from_index, timeout)

    def result(
        self, request_id: str, *, timeout: float | None = None, check: bool = True
    ) -> Result:
        """Wait for the request to end and give the whole.

        Raises RequestFailedError if it ended with an error, unless `check` is false; a request
        that was cancelled or expired gives what it had. Raises TimeoutError after `timeout`
        seconds (it goes on; call `cancel` to end it), RequestNotFoundError and StreamChangedError
        as `stream` does.
        """
        return fold(request_id, list(self._follow(request_id, 0, timeout)), check)

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        timeout: float | None = None,
        check: bool = True,
        **fields: Any,
    ) -> Result:
        """`enqueue` and `result` in one."""
        return self.result(self.enqueue(prompt, **fields), timeout=timeout, check=check)

    def sample(
        self,
        n: int,
        prompt: Prompt | None = None,
        *,
        timeout: float | None = None,
        check: bool = True,
        **fields: Any,
    ) -> Samples:
        """`enqueue_samples` and the results of all; `timeout` is that of the whole."""
        request_ids = self.enqueue_samples(n, prompt, **fields)
        deadline = None if timeout is None else time.monotonic() + timeout
        results = []
        for request_id in request_ids:
            left = None if deadline is None else deadline - time.monotonic()
            results.append(self.result(request_id, timeout=left, check=check))
        return Samples(request_ids, results)

    def cancel(self, request_id: str) -> CancelStatus:
        """End a request: at once if it waits, at its worker's next step if it runs."""
        with explained(self.url):
            return self._queue.cancel(check_request_id(request_id))

    def reprioritise(self, request_id: str, priority: int) -> PriorityStatus:
        """Move a waiting request to where it would be, had it come with this priority.

        Says whether it did; what a worker holds stays as it is. Raises InvalidRequestError.
        """
        calls = reprioritise(self._queue.keys, check_request_id(request_id), priority)
        return self._converse(calls)

    def state(self, request_id: str) -> RequestState | None:
        """Where a request is in its life; None if it is unknown."""
        with explained(self.url):
            return self._queue.state(check_request_id(request_id))

    def stats(self) -> QueueStats:
        """What the queue holds and how its workers fare."""
        return self._converse(read_stats(self._queue.keys))

    def overview(self) -> Overview:
        """What the queue holds, how its workers fare, and what it was like lately."""
        return self._converse(read_overview(self._queue.keys))

    def worker(self, worker_id: str) -> WorkerView:
        """A worker and its batch as it is now. Raises RequestNotFoundError for one that is gone."""
        return self._converse(read_worker(self._queue.keys, worker_id))

    def timeline(self, request_id: str) -> Timeline:
        """What happened to a request, and when. Raises RequestNotFoundError."""
        return self._converse(read_timeline(self._queue.keys, check_request_id(request_id)))

    def statistics(self, since_ms: int = 0) -> list[Sample]:
        """Samples of what the queue was like, one for each 5 s of the last hour, from
        `since_ms` (Unix milliseconds of the server) on, the oldest first.
        """
        return self._converse(read_statistics(self._queue.keys, since_ms))

    def keep_statistics(self) -> None:
        """Call it every few seconds to have samples of the time when no worker is alive, too."""
        self._converse(keep_statistics(self._queue.keys))

    def pause(self) -> None:
        """Hand out no more requests: they are taken in and wait. What runs goes on."""
        self._converse(set_paused(self._queue.keys, True))

    def resume(self) -> None:
        """Hand out requests again after `pause`."""
        self._converse(set_paused(self._queue.keys, False))

    def drain(self, worker_id: str | None = None) -> list[str]:
        """Tell workers to claim no more, finish what runs and exit, all or one. Gives their ids."""
        return self._converse(drain_workers(self._queue.keys, worker_id))

    def dead_ids(self, limit: int = 100) -> list[str]:
        """Ids of dead letters, the latest first."""
        with explained(self.url):
            return self._queue.run(lookups.dead_ids(self._queue.keys, limit))

    def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """Requests that were given up because they crash their workers, the latest first."""
        return self._converse(read_dead_letters(self._queue.keys, limit))

    def dead_letter(self, request_id: str) -> DeadLetter:
        """One dead letter. Raises RequestNotFoundError."""
        return self._converse(read_dead_letter(self._queue.keys, check_request_id(request_id)))

    def requeue(self, request_id: str) -> str:
        """Run a dead letter again; gives the new request's id. Raises RequestNotFoundError."""
        with explained(self.url):
            return self._queue.requeue(request_id)

    def purge(self, request_ids: Sequence[str]) -> int:
        """Delete dead letters; gives how many there were."""
        with explained(self.url):
            return self._queue.purge(request_ids)

    def create_api_key(self, key: ApiKey, weight: float | None = None) -> tuple[str, ApiKey]:
        """Make a key of the gateway: its secret, shown this once, and what is kept of it.

        With `weight`, that of its tenant is set too. Raises ConfigurationError.
        """
        return self._converse(api_keys.create(self._queue.keys, key, weight))

    def api_keys(self) -> list[ApiKey]:
        """The gateway's keys by name."""
        return self._converse(api_keys.list_all(self._queue.keys))

    def revoke_api_key(self, name: str) -> ApiKey:
        """Let nobody in with a key from now on. Raises RequestNotFoundError."""
        return self._converse(api_keys.revoke(self._queue.keys, name))

    def close(self) -> None:
        """End every wait and close the connections, unless the redis-py client was given."""
        self._queue.close()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enqueue(self, new: list[NewRequest]) -> list[str]:
        if not new:
            return []
        queue = self._queue.keys.queue
        with explained(self.url), enqueueing(self._tracing, queue, new) as traced:
            return self._queue.enqueue(traced)

    def _converse(self, calls: Generator[Call[Any], Any, T]) -> T:
        answer: Any = None
        with explained(self.url):
            while True:
                try:
                    call = calls.send(answer)
                except StopIteration as stop:
                    value: T = stop.value
                    return value
                answer = self._queue.run(call)

    def _follow(
        self, request_id: str, from_index: int, timeout: float | None
    ) -> Iterator[TokenEvent]:
        keys = self._queue.keys
        steps = follow(
            keys, check_request_id(request_id), from_index, silence=self._silence, timeout=timeout
        )
        return self._carry_out(steps)

    def _carry_out(self, steps: Steps) -> Iterator[TokenEvent]:
        with explained(self.url), closing(self._redis.pubsub()) as subscription:
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
                    return self._queue.run(call)
                case Wait(seconds):
                    return heard(subscription.get_message(timeout=seconds))
                case Sleep(seconds):
                    time.sleep(seconds)
                case Subscribe(channel, sharded):
                    subscription.close()
                    (subscription.ssubscribe if sharded else subscription.subscribe)(channel)
        except redis.RedisError as error:
            return error
