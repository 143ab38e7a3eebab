"""Joins tokens of several steps when they come faster than events should be sent.

An event costs the worker, the server and the subscriber the same whether it has one token or three.
If they run on the engine's cores, the engine loses that time. So there is a limit on the rate of
events, as network cards have one for interrupts. Up to that rate every token is sent by itself.
Above the rate, some tokens of a stream are sent together. An infinite rate is no limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from promptq.worker.engine.api.messages import SequenceOutput

_EVENTS_PER_CORE = 500
"""Events a second for each core. All three sides together need some 30 µs for an event, so events
take about a fiftieth of the core's time."""
LONGEST_SECONDS = 0.1
"""The longest time that a token waits here, however many streams there are."""


def default_rate() -> float:
    """Returns the default rate of events a second on this machine."""
    return float(_EVENTS_PER_CORE * (os.cpu_count() or 1))


class Coalescer:
    """Holds outputs on their way from the engine to the server; `clock` gives seconds.

    Outputs that somebody waits for pass at once, outside the rate limit: a first token, the first
    after a preemption, an end, and an output that the caller wants at once.
    """

    def __init__(
        self, events_per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._events_per_second = events_per_second
        self._clock = clock
        self._waiting: dict[int, SequenceOutput] = {}
        self._due_at = 0.0

    def take(self, output: SequenceOutput, at_once: bool = False) -> Sequence[SequenceOutput]:
        """Returns the outputs to send now that this one has come: none, or all of its sequence."""
        before = self._waiting.pop(output.sequence_id, None)
        if before is not None and output.token_ids:
            output.token_ids = before.token_ids + output.token_ids
            if before.logprobs is not None and output.logprobs is not None:
                output.logprobs = before.logprobs + output.logprobs
            before = None
        if at_once or output.timing or output.finish_reason or not output.token_ids:
            return (output,) if before is None else (before, output)
        self._waiting[output.sequence_id] = output
        return ()

    def take_due(self) -> list[SequenceOutput]:
        """Returns all outputs that wait, if they have waited long enough since the last time."""
        now = self._clock()
        if now < self._due_at or not self._waiting:
            return []
        outputs, self._waiting = [*self._waiting.values()], {}
        self._due_at = now + min(len(outputs) / self._events_per_second, LONGEST_SECONDS)
        return outputs

    def hurry(self) -> None:
        """Make all outputs that wait due now."""
        self._due_at = 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long until the waiting outputs are due; None if none wait."""
        return max(0.0, self._due_at - self._clock()) if self._waiting else None
