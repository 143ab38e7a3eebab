"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`.

Errors of /v1/messages have the form that Anthropic's clients expect.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from http import HTTPStatus

from redis.exceptions import RedisError

from promptq.producer.batch_store.batch_records import (
    BatchMissingError,
    BatchOverError,
    TooManyBatchesError,
)
from promptq.producer.batch_store.file_quotas import FileQuotaError
from promptq.producer.batch_store.files import FileMissingError
from promptq.producer.clients.connecting import explained
from promptq.shared.errors import (
    DeadlineRefusedError,
    InvalidRequestError,
    ModelNotServedError,
    NotReplicatedError,
    PromptqError,
    QueueFullError,
    RedisAuthError,
    RedisFullError,
    RedisSideError,
    RequestExistsError,
    RequestNotFoundError,
    SpoiltRecordError,
)
from promptq.shared.protocol.output_format import IF_NOT_STRICT

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
_TYPES_OF_MESSAGES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

NOT_AGAIN = {"x-should-retry": "false"}
"""Header that stops OpenAI's clients from retrying after the statuses 408, 409, 429 and 5xx."""
_NOT_RETRIED = (408, 409)

_ABSENCE_LOGGED_SECONDS = 60.0
"""Seconds between two log entries with the same reason why Redis cannot be used."""


def _default_code(status: int) -> str:
    """Returns the default code of errors with this status, such as `not_found`."""
    phrase = "invalid request" if status == 400 else HTTPStatus(status).phrase
    return phrase.lower().replace(" ", "_")


class ApiError(Exception):
    """An error that is the answer to a call. `param` is the wrong field. `code` identifies the
    error for programs. `unsupported` has fields of Anthropic's API that promptq lacks. `more` has
    further members of the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        unsupported: Sequence[str] = (),
        more: Mapping[str, object] = {},
    ) -> None:
        super().__init__(message)
        self.status = status
        self.more = more
        self.param = param
        self.unsupported = unsupported
        self.code = code or _default_code(status)
        self.headers = {**(NOT_AGAIN if status in _NOT_RETRIED else {}), **(headers or {})}

    @property
    def body(self) -> dict[str, object]:
        """The answer's body, in OpenAI's form."""
        kind = _TYPES.get(self.status, "api_error" if self.status < 500 else "server_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": {**error, **self.more}}

    @property
    def messages_body(self) -> dict[str, object]:
        """The answer's body, in the form of /v1/messages."""
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _TYPES_OF_MESSAGES.get(self.status, kind)
        details: dict[str, object] = {"error_code": self.code, **self.more}
        if self.unsupported:
            details["unsupported"] = self.unsupported
        error = {"type": kind, "message": str(self), "details": details}
        return {"type": "error", "error": error}

    def named(self, names: Mapping[str, str]) -> ApiError:
        """Returns this error with the endpoint's names of fields; see `in_api_names`."""
        message, param = in_api_names(names, str(self), self.param)
        return ApiError(
            self.status, message, param=param, code=self.code, headers=self.headers, more=self.more
        )


def in_api_names(
    names: Mapping[str, str], message: str, field: str | None
) -> tuple[str, str | None]:
    """Returns an error's message and field, both with the endpoint's names of fields.

    A message begins with the path of a field in a payload, such as `stop.0: `. `names` maps names
    in a payload to the endpoint's names. The form of a name decides where it is replaced:

    - a field's name: at the beginning of the path
    - a name with a dot: anywhere in the path
    - a name with a colon, such as "embed: pooling": at the beginning of the message
    - `IF_NOT_STRICT`, a piece of advice: anywhere after the path
    """
    for inner, outer in names.items():
        if ": " in inner and message.startswith(f"{inner}:"):
            return outer + message.removeprefix(inner), outer
    place, separator, reason = message.partition(": ")
    reason = reason.replace(IF_NOT_STRICT, names.get(IF_NOT_STRICT, IF_NOT_STRICT))
    path = field or ""
    for inside in (name for name in names if "." in name):
        place, path = (text.replace(inside, names[inside], 1) for text in (place, path))
    name, dot, rest = path.partition(".")
    renamed = names.get(name, name) + dot + rest
    return renamed + place.removeprefix(path) + separator + reason, renamed or None


def as_api_error(error: Exception) -> ApiError:
    """Returns the answer for an error. The details of an unexpected error are only in the log."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.field or None, code=error.error_type)
        case RequestNotFoundError() | FileMissingError() | BatchMissingError():
            return ApiError(404, str(error), code="not_found")
        case ModelNotServedError():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case RequestExistsError():
            return ApiError(409, str(error), code="exists")
        case DeadlineRefusedError():
            more = {"quote": asdict(error.quote)}
            return ApiError(409, str(error), param="deadline_ms", code="deadline", more=more)
        case NotReplicatedError():  # a client that repeats the call without a key sends it twice
            return ApiError(503, str(error), code="not_replicated", headers=NOT_AGAIN)
        case SpoiltRecordError():
            return ApiError(409, str(error), code="spoilt_record")
        case BatchOverError():
            return ApiError(409, str(error), code="batch_over")
        case FileQuotaError():  # not 429, because waiting does not help
            return ApiError(413, str(error), param="file", code="file_quota_exceeded")
        case TooManyBatchesError():
            return ApiError(429, str(error), code="too_many_batches", headers=NOT_AGAIN)
        case QueueFullError():
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_ms / 1000)))}
            return ApiError(429, str(error), code="queue_full", headers=headers)
        case RedisSideError() | RedisError():
            # Details about the server are for the log, not for callers.
            log_why_unavailable(error)
            message, seconds = "the queue cannot be reached at the moment; try again soon", 1
            if isinstance(error, RedisAuthError):
                message = (
                    "the Redis server refuses the gateway's commands; the gateway's log says why"
                )
                seconds = 5
            elif isinstance(error, RedisFullError):
                message = "the memory of the queue's server is full, so it accepts no request"
                message, seconds = f"{message}; try again later", 30
            headers = {"Retry-After": str(seconds)}
            return ApiError(503, message, code="queue_unavailable", headers=headers)
        case PromptqError():
            return ApiError(500, str(error))
    return ApiError(500, "the gateway failed; its log says why", code="gateway")


def unknown_completion(request_id: str) -> RequestNotFoundError:
    """Returns the error for a request that is unknown or does not belong to the caller."""
    return RequestNotFoundError(
        f"no completion {request_id[:80]!r} is known; it never existed, or its record has expired"
    )


def redis_side_error(error: RedisError, url: str, user: str) -> RedisSideError:
    """Returns promptq's error for an error of redis-py, for the log. `user` is the Redis user."""
    try:
        with explained(url):
            raise error
    except RedisAuthError as ours:
        return RedisAuthError(f"the user {user!r}: {ours}")
    except RedisSideError as ours:
        return ours
    except RedisError:
        return RedisSideError(str(error))


def log_why_unavailable(error: RedisSideError | RedisError) -> None:
    """Logs why calls get status 503: a refusal by the server once, other reasons once a minute."""
    if isinstance(error, RedisAuthError):
        _log_refusal(str(error))
    else:
        _log_absence(str(error), int(time.monotonic() / _ABSENCE_LOGGED_SECONDS))


@lru_cache(maxsize=16)
def _log_refusal(message: str) -> None:
    """Logs a refusal once for each message. The server repeats the refusal for every call."""
    from promptq.shared.runtime.logs import get_logger  # local batches may lack structlog

    get_logger().error(
        "the Redis server refuses a gateway's commands; give the gateway the URL of the user"
        " 'gateway' (promptq acl)",
        error=message,
    )


@lru_cache(maxsize=16)
def _log_absence(message: str, turn: int) -> None:
    from promptq.shared.runtime.logs import get_logger

    get_logger().warning("the Redis server cannot be used; calls get 503 meanwhile", error=message)
