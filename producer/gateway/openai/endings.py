"""How a choice ends: with one of OpenAI's finish reasons, or with an error."""

from __future__ import annotations

from promptq.producer.gateway.http.errors import NOT_AGAIN, ApiError
from promptq.shared.protocol.events import ErrorInfo
from promptq.shared.protocol.request import FinishReason, field_of


def finish_reason(reason: FinishReason, num_tool_calls: int, echo_only: bool) -> str:
    """`stop`, `length` or `tool_calls`. An expired request ends with `length`, too, and so does one
    that only echoes its prompt."""
    if reason is FinishReason.STOP and not echo_only:
        return "tool_calls" if num_tool_calls else "stop"
    return "length"


def failure(
    reason: FinishReason | None, error: ErrorInfo | None, num_tokens: int
) -> ApiError | None:
    """The error for a request that ended after so many tokens; None if it has an answer."""
    match reason:
        case FinishReason.ERROR:
            return _failed(error or ErrorInfo(type="internal_error", message="it failed"))
        case FinishReason.CANCELLED:
            return ApiError(409, "the request was cancelled", code="cancelled")
        case FinishReason.EXPIRED if num_tokens == 0:
            return ApiError(
                408,
                "deadline_ms: the deadline passed before the answer began",
                param="deadline_ms",
                code="deadline_exceeded",
            )
    return None


def _failed(error: ErrorInfo) -> ApiError:
    if error.type == "dead_letter":  # each retry may crash workers
        return ApiError(500, error.message, code=error.type, headers=NOT_AGAIN)
    if error.type not in ("invalid_request", "unsupported"):
        return ApiError(500, error.message, code=error.type)
    field = field_of(error.message)
    if field == "model":
        return ApiError(404, error.message, param=field, code="model_not_found")
    return ApiError(400, error.message, param=field, code=error.code or error.type)
