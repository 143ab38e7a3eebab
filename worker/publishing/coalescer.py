"""Brings tokens of several steps together where they come faster than events should.

An event costs worker, server and subscriber the same whether it brings one token or three, and
where they share cores with the engine, that time is the engine's loss. So there is a rate of
events, as network cards have one of interrupts: up to so many tokens a second go each by itself,
and of more some of a stream together. With an infinite rate all go by themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from promptq.worker.engine.api.messages import SequenceOutput

_EVENTS_PER_CORE = 500
"""Events a second for each core: of its time a fiftieth, at some 30 µs for all three sides."""
LONGEST_SECONDS = 0.1
"""That a token waits here, however many streams there are."""


def default_rate() -> float:
    """Events a second on this machine."""
    return float(_EVENTS_PER_CORE * (os.cpu_count() or 1))


class Coalescer:
    """Outputs on their way from the engine to the server; `clock` gives seconds.

    What somebody waits for passes at once, and does not count: a first token, the first after a
    preemption, an end, and what the caller wants at once.
    """

    def __init__(
        self, events_per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._events_per_second = events_per_second
        self._clock = clock
        self._waiting: dict[int, SequenceOutput] = {}
        self._due_at = 0.0

    def take(self, output: SequenceOutput, at_once: bool = False) -> Sequence[SequenceOutput]:
        """What is to be sent now that this has come: nothing, or all there is of its sequence."""
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
        """All that waits, if it has waited long enough since the last time."""
        now = self._clock()
        if now < self._due_at or not self._waiting:
            return []
        outputs, self._waiting = [*self._waiting.values()], {}
        self._due_at = now + min(len(outputs) / self._events_per_second, LONGEST_SECONDS)
        return outputs

    def hurry(self) -> None:
        """All that waits is due now."""
        self._due_at = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until what waits is due; None if nothing waits."""
        return max(0.0, self._due_at - self._clock()) if self._waiting else None
