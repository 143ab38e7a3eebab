"""Limits a worker's rate of events. Above the limit, an event has the tokens of several steps.

An event with three tokens costs the worker, Redis and the client as much as an event with one
token. If these processes run on the engine's cores, they take time from the engine. Below the
limit, each token is sent alone. Network cards limit their interrupts in the same way. An infinite
rate disables the limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from promptq.worker.engine.api.messages import SequenceOutput

_EVENTS_PER_CORE = 500
"""Events per second. Worker, Redis and client together need about 30 µs for an event, so events
take about 1.5 % of the cores' time."""
LONGEST_SECONDS = 0.1
"""Largest delay of a token in seconds, however many streams there are."""


def default_rate() -> float:
    """Returns the default rate of events a second on this machine."""
    return float(_EVENTS_PER_CORE * (os.cpu_count() or 1))


class Coalescer:
    """Delays outputs of the engine to limit the rate of events. `clock` returns seconds.

    Some outputs pass without delay, and do not count for the limit: a first token, the first token
    after a preemption, the end of a sequence, and outputs that come with `at_once`.
    """

    def __init__(
        self, events_per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._events_per_second = events_per_second
        self._clock = clock
        self._waiting: dict[int, SequenceOutput] = {}
        self._due_at = 0.0

    def take(self, output: SequenceOutput, at_once: bool = False) -> Sequence[SequenceOutput]:
        """Add a sequence's output. Returns the sequence's outputs that the caller must send now."""
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
        """Remove and return all waiting outputs. Returns an empty list before they are due."""
        now = self._clock()
        if now < self._due_at or not self._waiting:
            return []
        outputs, self._waiting = [*self._waiting.values()], {}
        self._due_at = now + min(len(outputs) / self._events_per_second, LONGEST_SECONDS)
        return outputs

    def hurry(self) -> None:
        """Make all waiting outputs due now."""
        self._due_at = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the waiting outputs are due; None if no output waits."""
        return max(0.0, self._due_at - self._clock()) if self._waiting else None
