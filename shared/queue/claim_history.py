"""Remembers which claims of a queue were answered, so that the server notices a lost reply.

With each claim, a worker names the last claim whose reply had requests. If the server has handed
out requests since then, the reply with these requests was lost. The server then immediately returns
the requests to the queue, and counts no crash.

The server can only judge claims that follow each other. So a claim that overlaps another claim
names no earlier claim. The server recognises a late claim by its number.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from promptq.shared.protocol.claims import ClaimContext, Claims

_NUM_REPLIES = 64
"""Number of recent replies whose delays are compared."""
_LONGEST_KEPT = 30.0
"""For at most this many seconds after a claim without requests, the next claims pass over `skip`
requests. Then a claim begins at the front of the queue again."""
_LONGEST_DELAY = 5.0
"""The longest plausible delay of a reply in seconds. A longer delay shows a change of the clock."""


class ClaimHistory:
    """Remembers the last answered claim of one queue object for the next claim. Thread-safe."""

    def __init__(self) -> None:
        self.is_unanswered = False
        """Whether the last call failed, so that the server may have handed out unknown requests."""
        self._session = secrets.token_hex(8)
        self._answered = ""
        self._skip = 0
        self._kept_since = -math.inf
        self._number = 0
        self._is_under_way = False
        self._clock_differences: deque[float] = deque(maxlen=_NUM_REPLIES)
        self._lock = threading.Lock()

    @contextmanager
    def call(self) -> Iterator[ClaimTurn]:
        """Context manager around one claim. The caller must store the reply in the attribute
        `claims` of the yielded object."""
        with self._lock:
            is_alone, self._is_under_way = not self._is_under_way, True
            self._number += is_alone
        self.is_unanswered = True
        turn = ClaimTurn(
            ClaimContext(self._session, self._answered, self._skip, self._number)
            if is_alone
            else ClaimContext()
        )
        try:
            yield turn
            self.is_unanswered = False
            self._skip = self._place_after(turn.claims)
            self._remove_delay(turn.claims)
            if turn.claims and is_alone:
                self._answered = turn.nonce
        finally:
            if is_alone:
                self._is_under_way = False

    def _place_after(self, claims: Claims) -> int:
        now = time.monotonic()
        if not claims:
            self._kept_since = now
        return claims.next_skip if now - self._kept_since < _LONGEST_KEPT else 0

    def _remove_delay(self, claims: Claims) -> None:
        """If this reply was slower than the quickest recent reply, subtracts the difference from
        `received_at`."""
        if claims:
            first = claims[0]
            difference = first.received_at - first.claimed_at_ms / 1000
            if difference > min(self._clock_differences, default=difference) + _LONGEST_DELAY:
                self._clock_differences.clear()  # another server, or its clock was set
            self._clock_differences.append(difference)
            received_at = first.claimed_at_ms / 1000 + min(self._clock_differences)
            for claim in claims:
                claim.received_at = received_at


class ClaimTurn:
    """One claim: a nonce, the facts to send about earlier claims, and the requests in the reply."""

    def __init__(self, context: ClaimContext) -> None:
        self.context = context
        self.nonce = secrets.token_hex(8)
        self.claims = Claims()
