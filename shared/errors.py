"""All errors that promptq raises on purpose, in one tree.

PromptqError
├── ConfigurationError            a setting or an option that cannot work
├── RedisSideError                the server, or the connection to it
│   ├── RedisUnavailableError     nothing answers at the address
│   │   ├── RedisBusyError        the server loads data, has no master, or runs a long script
│   │   └── RedisProtocolError    the server fails at TLS, or does not speak Redis' protocol
│   ├── RedisFullError            the server has no memory for more requests
│   ├── RedisAuthError            the server refuses these credentials
│   └── RedisTooOldError          the server lacks features that the scripts need
├── SpoiltRecordError             a record in Redis breaks the protocol; the message names its key
├── ModelError                    the model of a worker or a queue
│   ├── ModelNotFoundError        no causal language model can be loaded from the path or hub name
│   ├── UnsupportedModelError     a family that the engine would serve wrongly
│   ├── ModelMismatchError        the queue already serves another model
│   └── ModelNotServedError       no queue of the server serves this model
├── QueueError
│   ├── QueueFullError            a limit of the queue is reached; estimates the time to wait
│   └── QueueClosedError          the queue was used after close(), or close() ended a wait
└── RequestError                  one request
    ├── InvalidRequestError       a field is wrong; the message names it
    ├── RequestExistsError        a request with this id was enqueued before
    ├── DeadlineRefusedError      the request would miss its deadline; the error has the quote
    ├── NotReplicatedError        the request is written, but replicas may lack it
    ├── RequestNotFoundError      the id is unknown, or its record has expired
    ├── StreamChangedError        the server lost delivered tokens, and sent other tokens instead
    └── RequestFailedError        the request ended with `finish_reason: error`
"""

from __future__ import annotations

from typing import Any


class PromptqError(Exception):
    """Base of all errors that promptq raises on purpose."""


class ConfigurationError(PromptqError):
    """A setting or option has a value that cannot work. The message says which values can."""


class RedisSideError(PromptqError):
    """Base of errors of the Redis server and of the connection to it."""


class RedisUnavailableError(RedisSideError):
    """No usable server answers at the address."""


class RedisBusyError(RedisUnavailableError):
    """The server answers, but cannot serve: it loads data, has no master, or runs a long script."""


class RedisProtocolError(RedisUnavailableError):
    """The server at the address fails at TLS, or does not speak Redis' protocol."""


class RedisFullError(RedisSideError):
    """The server's memory is full, so it accepts no request."""


class RedisAuthError(RedisSideError):
    """The server refused the credentials, or their user lacks a permission."""


class RedisTooOldError(RedisSideError):
    """The server is older than Redis 7 or Valkey 8."""


class SpoiltRecordError(PromptqError):
    """A record in Redis breaks the protocol. Clients with write access can write such records."""


class ModelError(PromptqError):
    """Base of errors about the model of a worker or a queue."""


class ModelNotFoundError(ModelError):
    """No causal language model can be loaded from this path or hub name."""


class UnsupportedModelError(ModelError):
    """The engine refuses this model family, because it cannot serve the family correctly."""


class ModelMismatchError(ModelError):
    """Workers of another model serve the queue."""


class ModelNotServedError(ModelError):
    """No queue of the server serves a model of this name. The message names the served models."""


class QueueError(PromptqError):
    """Base of errors that concern a queue as a whole."""


class QueueFullError(QueueError):
    """The queue accepts no more requests for now.

    `retry_after_ms` is the estimated time in milliseconds until there is room. `limit` is the name
    of the queue's setting that was reached, such as `max_pending` or `max_pending_tokens:TENANT`.
    """

    def __init__(self, message: str, retry_after_ms: int, limit: str = "") -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.limit = limit


class QueueClosedError(QueueError):
    """The queue or client was closed."""


class RequestError(PromptqError):
    """Base of errors about one request."""


class InvalidRequestError(RequestError):
    """A field of a request is wrong.

    `field` is the field's name; empty if the whole payload is wrong. `error_type` and `code` become
    `error.type` and `error.code` of the request's last event.
    """

    def __init__(
        self,
        message: str,
        field: str = "",
        error_type: str = "invalid_request",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.error_type = error_type
        self.code = code


class RequestExistsError(RequestError):
    """A request with this id was enqueued before."""


class DeadlineRefusedError(RequestError):
    """A request with `deadline_policy: refuse` was not enqueued, because it would probably end
    after its deadline. `quote` (`promptq.shared.queue.places.Quote`) has the estimated times."""

    def __init__(self, message: str, quote: Any) -> None:
        super().__init__(message)
        self.quote = quote


class NotReplicatedError(RequestError):
    """Requests with `durability: replicated` are written, but a replica may lack them.

    The requests run, unless a failover loses them. `request_ids` are their ids. Repeating the call
    with the same ids or idempotency keys is safe.
    """

    def __init__(self, message: str, request_ids: list[str]) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class RequestNotFoundError(RequestError):
    """No request with this id is known: none was enqueued, or the request's record has expired."""

    @classmethod
    def of(cls, request_id: str, queue: str) -> RequestNotFoundError:
        return cls(
            f"no request {request_id!r} is known; it was never enqueued in the queue {queue!r}, or"
            " its record has expired"
        )


class StreamChangedError(RequestError):
    """The server lost tokens that a stream had delivered, and sent other tokens in their place."""


class RequestFailedError(RequestError):
    """The request ended with an error; `error_type` is the last event's `error.type`."""

    def __init__(self, message: str, error_type: str) -> None:
        super().__init__(message)
        self.error_type = error_type
