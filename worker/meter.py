"""Measures what goes through a worker. A step costs one update, not each of its tokens."""

from __future__ import annotations

from shared.observing import Contribution
from worker.engine.interface import SequenceOutput
from worker.held import HeldRequest

_MAX_TIMES = 2048
"""Of so many first tokens between two heartbeats the times are told; further ones only count."""


class Meter:
    """Fed by the publisher, read by heartbeats."""

    def __init__(self) -> None:
        self._contribution = Contribution()

    def note_output(self, held: HeldRequest, output: SequenceOutput, at: float) -> None:
        """Tokens of a request that a step gave at `at`, `time.monotonic()` in seconds."""
        if held.last_token_at is None:
            self._note_first_token(held, at)
        held.last_token_at = at

    def note_end(self, held: HeldRequest) -> None:
        """A request got its last event from this worker."""
        self._contribution.finished += 1

    def take_contribution(self) -> Contribution:
        """What came since the last call, for the queue's statistics."""
        taken, self._contribution = self._contribution, Contribution()
        return taken

    def _note_first_token(self, held: HeldRequest, at: float) -> None:
        if held.engine_request.output_token_ids:
            return  # an earlier attempt had it
        part = self._contribution
        if len(part.first_token_ms) >= _MAX_TIMES:
            return
        enqueued_at = held.claim.enqueued_at_ms
        part.first_token_ms.append(max(0, held.server_ms(at) - enqueued_at))
        if held.timing is not None and held.timing.scheduled_at is not None:
            scheduled_at = held.server_ms(held.timing.scheduled_at)
            part.queue_ms.append(max(0, scheduled_at - enqueued_at))
