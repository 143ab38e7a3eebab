"""Reads the bodies of HTTP requests, and limits their bytes in memory.

connection_limits.py drops a body that no route reads, such as that of a caller without a key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import contextmanager

from fastapi import Request

from promptq.producer.calls.errors import ApiError
from promptq.producer.http.content_codings import codings_of, decoded

_FREE_BYTES = 65_536
"""Number of bytes at the beginning of each body that do not count towards the budget."""

_RETRY_AFTER = {"Retry-After": "1"}


async def read_body(request: Request, most: int, hold: Hold) -> bytes:
    """Returns a body of at most `most` bytes. Raises the errors of `body_pieces`."""
    return b"".join([piece async for piece in body_pieces(request, most, hold)])


async def body_pieces(
    request: Request, most: int, hold: Hold, *, most_beside: int = 0, what: str = "body"
) -> AsyncGenerator[bytes, None]:
    """Yields the decoded pieces of a body as they arrive. The body may have at most `most` bytes of
    `what`, such as a file, and at most `most_beside` bytes of other data.

    Raises ApiError 413 as soon as there are more bytes. Raises ApiError 400 or 415 for a body that
    cannot be decoded. Also raises the errors of `hold`.
    """
    too_large = ApiError(
        413,
        f"the {what} is larger than the {most} bytes that are allowed",
        param=None if what == "body" else what,
        code=f"{what}_too_large",
    )
    codings = codings_of(request.headers.getlist("content-encoding"))
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most + most_beside:
        raise too_large

    async def bounded(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        size = 0
        async for piece in pieces:
            size += len(piece)
            if size > most + most_beside:
                raise too_large
            yield piece

    pieces = bounded(request.stream())
    for coding in codings:
        pieces = bounded(decoded(pieces, coding))
    async for piece in pieces:
        hold.add(len(piece))
        yield piece


class BodyBudget:
    """Limits for the bytes of bodies in memory: one for each tenant, and one for all together."""

    def __init__(self, most_of_tenant: int, most_in_all: int) -> None:
        self._most_of_tenant = most_of_tenant
        self._most_in_all = most_in_all
        self._of_tenants: Counter[str] = Counter()
        self._in_all = 0

    @contextmanager
    def hold(self, tenant: str) -> Iterator[Hold]:
        """Context manager that yields an empty part of the budget, which can grow until the block
        ends."""
        hold = Hold(self, tenant)
        try:
            yield hold
        finally:
            hold.release()

    def take(self, tenant: str, num_bytes: int) -> None:
        """Takes bytes from the budget. Raises ApiError 429 if the tenant would exceed its limit,
        and 503 if all tenants together would exceed the limit for all."""
        wanted = self._of_tenants[tenant] + num_bytes
        if wanted > self._most_of_tenant:
            raise ApiError(
                429,
                f"more than {self._most_of_tenant} bytes of the calls of tenant {tenant!r} are not"
                " in the queue yet; wait until some of them are",
                code="bodies_of_tenant",
                headers=_RETRY_AFTER,
            )
        if wanted > self._most_in_all - self._in_all:
            raise ApiError(
                503,
                "the gateway reads too many bytes of calls at the same time; try again soon",
                code="bodies",
                headers=_RETRY_AFTER,
            )
        self._of_tenants[tenant] = wanted
        self._in_all += num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        self._in_all -= num_bytes
        self._of_tenants[tenant] -= num_bytes
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]


class Hold:
    """The part of the budget that one HTTP request uses."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self._num_bytes = 0
        self._num_taken = 0

    def add(self, num_bytes: int) -> None:
        """Takes `num_bytes` more from the budget. Raises ApiError like `BodyBudget.take`."""
        self.grow_to(self._num_bytes + num_bytes)

    def grow_to(self, num_bytes: int) -> None:
        """Takes bytes until this hold has `num_bytes`. Raises ApiError like `BodyBudget.take`."""
        more = max(0, num_bytes - _FREE_BYTES) - self._num_taken
        if more > 0:
            self._budget.take(self._tenant, more)
            self._num_taken += more
        self._num_bytes = max(self._num_bytes, num_bytes)

    def release(self) -> None:
        """Returns all bytes of this hold to the budget."""
        if self._num_taken:
            self._budget.give_back(self._tenant, self._num_taken)
        self._num_bytes = self._num_taken = 0
