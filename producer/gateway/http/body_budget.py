"""How many bytes of requests' bodies a gateway holds at once: of each caller, and in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from promptq.producer.gateway.http.errors import ApiError

_RETRY_AFTER = {"Retry-After": "1"}


class BodyBudget:
    """Bytes count as they come, not as they are announced: who sends slowly holds little."""

    def __init__(self, most_of_caller: int, most_in_all: int) -> None:
        self._most_of_caller = most_of_caller
        self._most_in_all = most_in_all
        self._of_callers: Counter[str] = Counter()
        self._in_all = 0

    @contextmanager
    def hold(self, caller: str) -> Iterator[Hold]:
        """What is taken of the budget within is given back at the end."""
        hold = Hold(self, caller)
        try:
            yield hold
        finally:
            hold.release()

    def take(self, caller: str, num_bytes: int) -> None:
        """Raises ApiError 429 where the caller has too much on its way, 503 where all have."""
        if self._of_callers[caller] + num_bytes > self._most_of_caller:
            raise ApiError(
                429,
                f"the bodies of requests that are on their way with the key {caller!r} have more"
                f" than {self._most_of_caller} bytes; wait until some are taken in",
                code="bodies_of_key",
                headers=_RETRY_AFTER,
            )
        if self._in_all + num_bytes > self._most_in_all:
            raise ApiError(
                503,
                "the gateway has as many bytes of requests on their way as it may; try again soon",
                code="bodies",
                headers=_RETRY_AFTER,
            )
        self._of_callers[caller] += num_bytes
        self._in_all += num_bytes

    def give_back(self, caller: str, num_bytes: int) -> None:
        self._in_all -= num_bytes
        self._of_callers[caller] -= num_bytes
        if not self._of_callers[caller]:
            del self._of_callers[caller]


class Hold:
    """What one request has taken."""

    def __init__(self, budget: BodyBudget, caller: str) -> None:
        self._budget = budget
        self._caller = caller
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises ApiError as `BodyBudget.take`."""
        self._budget.take(self._caller, num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Give all of it back, as soon as the bytes are needed no more; again it does nothing."""
        self._budget.give_back(self._caller, self._num_bytes)
        self._num_bytes = 0
