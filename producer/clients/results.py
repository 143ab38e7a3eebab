"""What a client returns for finished requests."""

from __future__ import annotations

from dataclasses import dataclass

from promptq.shared.errors import RequestFailedError
from promptq.shared.protocol.events import Result, TokenEvent, Usage
from promptq.shared.protocol.request import FinishReason


@dataclass(frozen=True, slots=True)
class Samples:
    """The results of several samples of one prompt, in the order of their ids."""

    request_ids: list[str]
    results: list[Result]

    @property
    def texts(self) -> list[str]:
        return [result.text for result in self.results]

    @property
    def usage(self) -> Usage:
        """Tokens of all samples; the prompt counts once."""
        return Usage.of_samples([result.usage for result in self.results])


def fold(request_id: str, events: list[TokenEvent], check: bool) -> Result:
    """The result of a whole stream. If `check`, raises RequestFailedError for a failed request."""
    result = Result.fold(events)
    if check and result.finish_reason is FinishReason.ERROR:
        error_type = result.error.type if result.error else "unknown"
        message = result.error.message if result.error else "the request failed without a reason"
        raise RequestFailedError(f"request {request_id!r} failed: {message}", error_type)
    return result
