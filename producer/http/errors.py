"""Converts errors of all routes to HTTP answers, and describes these in the OpenAPI document."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from promptq.producer.calls.errors import ApiError, as_api_error, redis_side_error
from promptq.shared.errors import PromptqError

_MESSAGES = "/v1/messages"
_MEANINGS = {
    400: "a field is wrong; `param` names it",
    401: "there is no API key (`Authorization: Bearer KEY`, `X-Api-Key: KEY` or `Api-Key: KEY`), or"
    " it is not known",
    403: "the API key does not allow it",
    404: "no model, stream, file or batch has this id, or it belongs to another tenant",
    408: "`deadline_ms` passed before the answer began",
    409: "it was cancelled, has ended or would miss its deadline, or its record in Redis breaks the"
    " protocol",
    413: "the body is too large",
    429: "a limit of the queue or of the API key is reached; `Retry-After` says how long to wait",
    500: "the worker failed with the request",
    503: "the queue cannot be reached, or no worker takes requests and makes progress",
}

_CLIENT_LEFT = 499
"""Status in the log, as in nginx, if the client closed its connection before it got the answer."""

_LONGEST_PATH = 100
_PREFIX = "/v1"
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


class ClientLeftError(Exception):
    """The client closed its connection before it got the answer."""


class ErrorObject(BaseModel):
    """An error of a call."""

    message: str
    type: str
    param: str | None = Field(description="the field that is wrong")
    code: str = Field(description="a word for programs")


class ErrorAnswer(BaseModel):
    """The body of an error's answer, for the API's description."""

    error: ErrorObject


class MessagesErrorObject(BaseModel):
    """An error of a call of /v1/messages."""

    type: str
    message: str
    details: dict[str, str | list[str]] = Field(
        description="`error_code` is a word for programs; `unsupported` names fields"
    )


class MessagesErrorAnswer(BaseModel):
    """The body of an error's answer of /v1/messages, for the API's description."""

    type: Literal["error"]
    error: MessagesErrorObject


def described(
    *statuses: int, model: type[BaseModel] = ErrorAnswer
) -> dict[int | str, dict[str, Any]]:
    """Returns descriptions of errors with these statuses, for FastAPI's argument `responses`."""
    answers: dict[int | str, dict[str, Any]] = {
        status: {"model": model, "description": _MEANINGS[status]} for status in statuses
    }
    # Without the default, FastAPI describes its error 422, which clients of promptq never get.
    return {**answers, "default": {"model": model, "description": "any other error"}}


def response_of(error: ApiError, path: str) -> JSONResponse:
    """Returns the answer for an error, in the form of the API to which the path belongs."""
    is_of_messages = path == _MESSAGES or path.startswith(f"{_MESSAGES}/")
    body = error.messages_body if is_of_messages else error.body
    return JSONResponse(body, error.status, error.headers)


def add_handlers(app: FastAPI) -> None:
    """Makes the application answer all errors in the form of the route's API."""

    def answered(request: Request, error: ApiError) -> JSONResponse:
        return response_of(error, request.scope["path"])

    @app.exception_handler(ClientDisconnect)  # the client left while its body was read
    @app.exception_handler(ClientLeftError)
    async def _client_left(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(ApiError)
    @app.exception_handler(PromptqError)
    @app.exception_handler(Exception)
    async def _any_other(request: Request, error: Exception) -> JSONResponse:
        return answered(request, as_api_error(error))

    @app.exception_handler(RedisError)
    async def _redis_error(request: Request, error: RedisError) -> JSONResponse:
        gateway = request.app.state.gateway
        explained = redis_side_error(error, gateway.client.url, gateway.redis_user)
        return answered(request, as_api_error(explained))

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        method, path, headers = request.method, request.scope["path"], dict(error.headers or {})
        shown = ApiError(error.status_code, str(error.detail), headers=headers)
        if error.status_code == 404:
            shown = ApiError(404, unknown_path(app, method, path), code="path_not_found")
        elif error.status_code == 405:
            shown = method_not_allowed(method, path, allowed_methods(app, request.scope))
        return answered(request, shown)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part not in ("body", "query", "header")]
        field = ".".join(where)
        reason = "is missing" if first["type"] == "missing" else first["msg"]
        return answered(request, ApiError(400, f"{field or 'body'}: {reason}", param=field or None))


def unknown_path(app: FastAPI, method: str, path: str) -> str:
    """Returns the message for an unknown path: the most similar path, and all paths under /v1."""
    served = [*app.openapi()["paths"]]
    # The base URL of a client often has no /v1, or has it twice.
    meant = [each for each in (_PREFIX + path, path.removeprefix(_PREFIX)) if each in served]
    meant += get_close_matches(path[:_LONGEST_PATH], served, n=1)
    hint = f"; do you mean {meant[0]}?" if meant else ""
    paths = ", ".join(each for each in served if each.startswith(_PREFIX))
    return (
        f"{method} {path[:_LONGEST_PATH]} is not served{hint} (there are {paths}; /docs describes"
        " all)"
    )


def allowed_methods(app: FastAPI, scope: Scope) -> str:
    """Returns the methods that a call's path supports, as a value of the header `Allow`."""
    calls = {method: {**scope, "method": method} for method in _METHODS}
    return ", ".join(
        method
        for method, call in calls.items()
        if any(route.matches(call)[0] is Match.FULL for route in app.routes)
    )


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    """Returns the error for a method that a path does not support. `allowed` are its methods."""
    message = f"{method} {path[:_LONGEST_PATH]} is not served; this path takes {allowed}"
    return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
