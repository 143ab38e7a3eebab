"""What can go wrong between a worker and its inference server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ServerFaultError(Exception):
    """The server does not answer, or broke off: what it had is computed again."""


class UnusableAnswerError(Exception):
    """The server's answer to one request has values that no answer has, such as a NaN."""


class OverloadedError(Exception):
    """The server takes no more for now. `seconds` says for how long, if the server does."""

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class RefusedError(Exception):
    """The server refuses this one request, and would do so again. `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def malformed_as_fault() -> Iterator[None]:
    """Raise ServerFaultError where an answer is not built as this kind of server builds it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ServerFaultError(f"the server's answer is malformed: {error!r:.500}") from error
