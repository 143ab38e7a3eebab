"""Notes which claims of a queue were answered, so that the server notices a lost reply.

A worker names with each claim the last claim that gave it something. If the server gave more since
then, that reply was lost, and those requests go back to waiting at once, without counting as a
crash. This is right only for calls one after the other, so a call beside another one names nothing.
The worker also numbers its claims, so that the server recognises a claim that arrives too late.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from promptq.shared.protocol.claims import ClaimContext, Claims


class ClaimHistory:
    """The claims of one queue object. Thread-safe."""

    def __init__(self) -> None:
        self.is_unanswered = False
        """Whether the last call failed, so that the server may have handed out unknown requests."""
        self._session = secrets.token_hex(8)
        self._answered = ""
        self._skip = 0
        self._number = 0
        self._is_under_way = False
        self._lock = threading.Lock()

    @contextmanager
    def call(self) -> Iterator[ClaimTurn]:
        """Surrounds one claim, whose reply the caller assigns to `turn.claims`."""
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
            self._skip = turn.claims.next_skip
            if turn.claims and is_alone:
                self._answered = turn.nonce
        finally:
            if is_alone:
                self._is_under_way = False


class ClaimTurn:
    """One claim: its facts about earlier claims, and its result."""

    def __init__(self, context: ClaimContext) -> None:
        self.context = context
        self.nonce = secrets.token_hex(8)
        self.claims = Claims()
