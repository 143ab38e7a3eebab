"""Results of finished requests, in the form that clients return."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from promptq.shared.errors import RequestFailedError
from promptq.shared.protocol.events import Result, TokenEvent, Usage
from promptq.shared.protocol.request import FinishReason


@dataclass(frozen=True, slots=True)
class Samples:
    """The results of several samples of one prompt, in the order of `request_ids`."""

    request_ids: list[str]
    results: list[Result]

    @property
    def texts(self) -> list[str]:
        return [result.text for result in self.results]

    @property
    def usage(self) -> Usage:
        """Token counts of all samples. The prompt counts once."""
        return Usage.of_samples([result.usage for result in self.results])


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of several texts, in the order of the texts."""

    request_ids: list[str]
    results: list[Result]

    @property
    def vectors(self) -> list[list[float]]:
        return [result.vector for result in self.results]

    @property
    def usage(self) -> Usage:
        """Token counts of all texts."""
        usages = [result.usage for result in self.results]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
        )


def countdown(timeout: float | None) -> Callable[[], float | None]:
    """Returns a function that returns the remaining seconds of `timeout` (None: no timeout)."""
    if timeout is None:
        return lambda: None
    deadline = time.monotonic() + timeout
    return lambda: deadline - time.monotonic()


def checked_vector(request_id: str, result: Result) -> Result:
    """Returns the result. Raises RequestFailedError if the result has no vector."""
    try:
        _ = result.vector
    except ValueError:
        reason = result.finish_reason.value
        message = f"request {request_id!r} has no vector: it ended with {reason!r}"
        raise RequestFailedError(message, reason) from None
    return result


def fold(request_id: str, events: list[TokenEvent], check: bool) -> Result:
    """Combines events into a result. With `check`, a request's error raises RequestFailedError."""
    result = Result.fold(events)
    if check and result.finish_reason is FinishReason.ERROR:
        error_type = result.error.type if result.error else "unknown"
        message = result.error.message if result.error else "the request failed without a reason"
        raise RequestFailedError(f"request {request_id!r} failed: {message}", error_type)
    return result
