"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`.

Those of /v1/messages are as Anthropic's clients expect them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from promptq.producer.batch_store.batch_records import (
    BatchMissingError,
    BatchOverError,
    TooManyBatchesError,
)
from promptq.producer.batch_store.file_quotas import FileQuotaError
from promptq.producer.batch_store.files import FileMissingError
from promptq.producer.clients.connecting import explained
from promptq.producer.gateway.http.served_paths import allowed_methods, unknown_path, wrong_method
from promptq.shared.errors import (
    InvalidRequestError,
    ModelNotServedError,
    PromptqError,
    QueueFullError,
    RedisAuthError,
    RedisFullError,
    RedisSideError,
    RequestExistsError,
    RequestNotFoundError,
    SpoiltRecordError,
)
from promptq.shared.runtime.logs import get_logger

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
_MESSAGES = "/v1/messages"
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
_MEANINGS = {
    400: "something is wrong with what was asked; `param` names the field",
    401: "there is no API key (`Authorization: Bearer KEY`, `X-Api-Key: KEY` or `Api-Key: KEY`), or"
    " it is not known",
    403: "more than the API key allows",
    404: "no model, stream, file or batch of this id, or it is another tenant's",
    408: "`deadline_ms` passed before the answer began",
    409: "it was cancelled, is over, or its record in Redis was spoilt",
    413: "the body is too large",
    429: "a limit of the queue or of the API key is reached; `Retry-After` says how long to wait",
    500: "the worker failed with the request",
    503: "the queue cannot be reached, or no worker takes requests and gets on",
}


NOT_AGAIN = {"x-should-retry": "false"}
"""Tells OpenAI's clients, which repeat 408, 409, 429 and 5xx, that a retry would fail too."""
_FINAL = (408, 409)

_ABSENCE_LOGGED_SECONDS = 60.0

_CLIENT_LEFT = 499
"""What nginx logs for a client that closed its connection. Nobody is there to read it."""


class ClientLeftError(Exception):
    """The client closed its connection before it got the answer."""


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = Field(description="the field that is wrong")
    code: str = Field(description="a word for programs")


class ErrorAnswer(BaseModel):
    """The body of each error's answer, for the API's description."""

    error: ErrorObject


class MessagesErrorObject(BaseModel):
    """What went wrong with a call of /v1/messages."""

    type: str
    message: str
    details: dict[str, str | list[str]] = Field(
        description="`error_code` is a word for programs; `unsupported` names fields"
    )


class MessagesErrorAnswer(BaseModel):
    """The body of each error's answer of /v1/messages."""

    type: Literal["error"]
    error: MessagesErrorObject


def _word_for(status: int) -> str:
    """Returns a code for errors that have no narrower one, such as `not_found`."""
    phrase = "invalid request" if status == 400 else HTTPStatus(status).phrase
    return phrase.lower().replace(" ", "_")


class ApiError(Exception):
    """An answer other than 2xx. `param` is the field that is wrong, `code` a word for programs.

    `unsupported` are fields of Anthropic's API that are not served.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        unsupported: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.unsupported = unsupported
        self.code = code or _word_for(status)
        self.headers = {**(NOT_AGAIN if status in _FINAL else {}), **(headers or {})}

    @property
    def body(self) -> dict[str, object]:
        """The error object."""
        kind = _TYPES.get(self.status, "api_error" if self.status < 500 else "server_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def messages_body(self) -> dict[str, object]:
        """The error object of /v1/messages."""
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _TYPES_OF_MESSAGES.get(self.status, kind)
        details: dict[str, object] = {"error_code": self.code}
        if self.unsupported:
            details["unsupported"] = self.unsupported
        error = {"type": kind, "message": str(self), "details": details}
        return {"type": "error", "error": error}

    def response(self, path: str) -> JSONResponse:
        """The answer to a call of this path."""
        is_of_messages = path == _MESSAGES or path.startswith(f"{_MESSAGES}/")
        body = self.messages_body if is_of_messages else self.body
        return JSONResponse(body, self.status, self.headers)

    def named(self, names: Mapping[str, str]) -> ApiError:
        """The error with the name that its field has at an endpoint."""
        message, param = named_as_asked(names, str(self), self.param)
        return ApiError(self.status, message, param=param, code=self.code, headers=self.headers)


def named_as_asked(
    names: Mapping[str, str], message: str, field: str | None
) -> tuple[str, str | None]:
    """An error's message, which begins with the path of a payload's field, and that field.

    Both with the names that an endpoint has for the field and for what is inside.
    """
    place, separator, reason = message.partition(": ")
    for inside in (name for name in names if "." in name):
        place = place.replace(inside, names[inside], 1)
    name = names.get(field or "", field)
    return (name or "") + place.removeprefix(field or "") + separator + reason, name


def as_api_error(error: Exception) -> ApiError:
    """The answer for an error. If it is not one of ours, only the log says more."""
    match error:
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.field or None, code=error.error_type)
        case RequestNotFoundError() | FileMissingError() | BatchMissingError():
            return ApiError(404, str(error), code="not_found")
        case ModelNotServedError():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case RequestExistsError():
            return ApiError(409, str(error), code="exists")
        case SpoiltRecordError():
            return ApiError(409, str(error), code="spoilt_record")
        case BatchOverError():
            return ApiError(409, str(error), code="batch_over")
        case FileQuotaError():  # not 429: it does not help to wait
            return ApiError(413, str(error), param="file", code="file_quota_exceeded")
        case TooManyBatchesError():
            return ApiError(429, str(error), code="too_many_batches", headers=NOT_AGAIN)
        case QueueFullError():
            seconds = max(1, math.ceil(error.retry_after_ms / 1000))
            return ApiError(
                429, str(error), code="queue_full", headers={"Retry-After": str(seconds)}
            )
        case RedisAuthError():
            log_why_unavailable(error)
            return ApiError(
                503,
                "the gateway may not use its Redis server; its log says why",
                code="queue_unavailable",
                headers={"Retry-After": "5"},
            )
        case RedisFullError():
            log_why_unavailable(error)
            return ApiError(
                503,
                "the memory of the queue's server is full, so it accepts no request; try again"
                " later",
                code="queue_unavailable",
                headers={"Retry-After": "30"},
            )
        case RedisSideError() | RedisError():
            # Details about the server are for the log, not for callers.
            log_why_unavailable(error)
            return ApiError(
                503,
                "the queue cannot be reached at the moment; try again soon",
                code="queue_unavailable",
                headers={"Retry-After": "1"},
            )
        case PromptqError():
            return ApiError(500, str(error))
    return ApiError(500, "the gateway failed; its log says why", code="gateway")


def redis_side_error(error: RedisError, url: str, user: str) -> RedisSideError:
    """What redis-py raised, as an error of ours, for the log."""
    try:
        with explained(url):
            raise error
    except RedisAuthError as told:
        return RedisAuthError(f"the user {user!r}: {told}")
    except RedisSideError as told:
        return told
    except RedisError:
        return RedisSideError(str(error))


def log_why_unavailable(error: RedisSideError | RedisError) -> None:
    """Log why calls get 503, but not for each of them."""
    if isinstance(error, RedisAuthError):
        _log_refusal(str(error))
    else:
        _log_absence(str(error), int(time.monotonic() / _ABSENCE_LOGGED_SECONDS))


@lru_cache(maxsize=16)
def _log_refusal(told: str) -> None:
    """Log each message of the server once: it would repeat it for every call."""
    get_logger().error(
        "the Redis server refuses what a gateway does; give the gateway the URL of the user"
        " 'gateway' (promptq acl)",
        error=told,
    )


@lru_cache(maxsize=16)
def _log_absence(told: str, turn: int) -> None:
    """Log a message once in each turn of `_ABSENCE_LOGGED_SECONDS`."""
    get_logger().warning("the Redis server cannot be used; calls get 503 meanwhile", error=told)


def described(
    *statuses: int, model: type[BaseModel] = ErrorAnswer
) -> dict[int | str, dict[str, Any]]:
    """The errors of an endpoint or a router, for the API's description."""
    found: dict[int | str, dict[str, Any]] = {
        status: {"model": model, "description": _MEANINGS[status]} for status in statuses
    }
    # Without this entry FastAPI describes its own error 422, which our clients never get.
    return {**found, "default": {"model": model, "description": "any other error"}}


def add_handlers(app: FastAPI) -> None:
    """Give all errors of all routes the form of their path."""

    def answered(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.scope["path"])

    @app.exception_handler(ApiError)
    async def _api_error(request: Request, error: ApiError) -> JSONResponse:
        return answered(request, error)

    @app.exception_handler(ClientDisconnect)  # it left while its body was read
    @app.exception_handler(ClientLeftError)
    async def _client_left(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(PromptqError)
    @app.exception_handler(Exception)
    async def _any_other(request: Request, error: Exception) -> JSONResponse:
        return answered(request, as_api_error(error))

    @app.exception_handler(RedisError)
    async def _redis_error(request: Request, error: RedisError) -> JSONResponse:
        gateway = request.app.state.gateway
        return answered(
            request, as_api_error(redis_side_error(error, gateway.client.url, gateway.redis_user))
        )

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        told, code, headers = str(error.detail), None, dict(error.headers or {})
        if error.status_code == 404:
            told, code = unknown_path(app, request.method, request.scope["path"]), "path_not_found"
        elif error.status_code == 405:
            headers["Allow"] = allowed = allowed_methods(app, request.scope)
            told = wrong_method(request.method, request.scope["path"], allowed)
            code = "method_not_allowed"
        return answered(request, ApiError(error.status_code, told, code=code, headers=headers))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part not in ("body", "query", "header")]
        field = ".".join(where)
        if first["type"] == "json_invalid":
            told = f"the body is not JSON: {first['ctx']['error']}"
            return answered(request, ApiError(400, told))
        told = f"{field or 'body'}: {first['msg']}"
        return answered(request, ApiError(400, told, param=field or None))
