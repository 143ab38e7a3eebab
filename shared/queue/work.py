"""How much work a queue has, and what its workers do in a second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.call import Call

TARGET_SECONDS = 30.0
"""How long a request should wait at most, where nobody says otherwise."""
SOON_MS = 60_000
"""A delayed request that is due within this time counts, since a worker takes time to start."""
WINDOW_SECONDS = 30.0
"""Over this time the script counts what was asked for."""
_MOST_DEADLINES = 1000


@dataclass(frozen=True, slots=True)
class Work:
    """What waits and runs in a queue, as the server measured it. Work is in output tokens."""

    num_waiting: int = 0
    num_active: int = 0
    """Requests that workers hold."""
    num_running: int = 0
    """The most that ran at once in the last minute."""
    num_delayed: int = 0
    """Those that are due within `SOON_MS`."""
    oldest_ms: int = 0
    """How long the oldest of those next in line has waited."""
    num_workers: int = 0
    """Workers that claim: those that drain are left out."""
    num_slots: int = 0
    """How many requests these take at once."""
    tokens_of_answer: float = 256.0
    """The mean length of the last answers."""
    tokens_of_worker: float = 0.0
    """What one worker makes in a second while requests wait; 0 if that was not measured yet."""
    tokens_asked_for: float = 0.0
    """What was asked for in a second, the most of any half minute of the last minute."""
    is_paused: bool = False
    front: float | None = None
    """The lowest score of those that wait: its priority and when it came. None if none waits."""
    deadlines_ms: list[int] = field(default_factory=list)
    """Time until the deadlines of requests that have one, the nearest first; at most 1,000."""

    @property
    def seconds_of_answer(self) -> float | None:
        """How long one worker takes for an answer; None if that was not measured yet."""
        return self.tokens_of_answer / self.tokens_of_worker if self.tokens_of_worker else None


_COUNTS = (
    *("num_waiting", "num_active", "num_running", "num_delayed"),
    *("oldest_ms", "num_workers", "num_slots"),
)


def measure_work(keys: Keys) -> Call[Work]:
    """The work of a queue."""

    def parse(reply: list[Any]) -> Work:
        return Work(
            **{name: int(it) for name, it in zip(_COUNTS, reply, strict=False)},
            tokens_of_answer=float(reply[7]),
            tokens_of_worker=float(reply[8]),
            tokens_asked_for=float(reply[9]),
            is_paused=bool(reply[10]),
            front=float(reply[11]) if reply[11] else None,
            deadlines_ms=[int(it) for it in reply[12:]],
        )

    return Call("measure_work", [SOON_MS, _MOST_DEADLINES], parse, keys=keys)
