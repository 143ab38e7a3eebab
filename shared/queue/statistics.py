"""Calls that write and read a queue's statistics, and that measure its work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.worker_stats import SLOTS, Sample, SlotStats
from promptq.shared.queue.call import Call, named, text_map
from promptq.shared.queue.spoilt import readable

SOON_MS = 60_000
"""Delayed requests that are due within this time count, since a worker takes time to start."""
WINDOW_SECONDS = 30.0
"""The time over which the script averages the requested tokens."""
_MOST_DEADLINES = 1000


def slots(keys: Keys, worker_id: str) -> Call[tuple[int, list[SlotStats]]]:
    """Reads the batch that a worker last reported, after the time of the report (server time in ms;
    0: never)."""

    def parse(reply: list[Any]) -> tuple[int, list[SlotStats]]:
        reported_at, batch = reply
        return int(reported_at or 0), SLOTS.validate_json(batch or b"[]")

    reading = ["HMGET", keys.slots(worker_id), "told_at", "slots"]
    return Call("", reading, parse, lambda: (0, []))


@dataclass(slots=True)
class Contribution:
    """A worker's additions to the queue's statistics since its last call."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    finished: int = 0
    first_token_ms: list[int] = field(default_factory=list)
    """From enqueueing to the first token, of each request that got it."""
    queue_ms: list[int] = field(default_factory=list)
    """From enqueueing to the first prefill, of the same requests."""


def sample(part: Contribution) -> Call[int]:
    """Add to the statistics, and write the sample whose time is over, even if nothing is added.
    Returns the number of written samples."""
    args = named(
        generated_tokens=part.generated_tokens,
        prompt_tokens=part.prompt_tokens,
        finished=part.finished,
        ttft=" ".join(map(str, part.first_token_ms)),
        queue=" ".join(map(str, part.queue_ms)),
    )
    return Call("statistics", args, int)


def samples(keys: Keys, since_ms: int, limit: int | None = None) -> Call[list[Sample]]:
    """Samples from `since_ms` on, the oldest first. With `limit`, only the latest ones."""

    def parse(reply: list[Any]) -> list[Sample]:
        samples = readable(keys.statistics, reply, _sample_of)
        return samples if limit is None else samples[::-1]

    if limit is None:
        return Call("", ["XRANGE", keys.statistics, since_ms, "+"], parse, list)
    return Call("", ["XREVRANGE", keys.statistics, "+", since_ms, "COUNT", limit], parse, list)


def _sample_of(entry: tuple[bytes, Any]) -> Sample:
    entry_id, reply = entry
    return Sample.model_validate({**text_map(reply), "at": int(entry_id.split(b"-")[0])})


def priorities(keys: Keys) -> Call[dict[int, int]]:
    """The number of waiting requests by priority: estimates if more than some hundreds wait."""

    def parse(reply: list[int]) -> dict[int, int]:
        return dict(sorted(zip(map(int, reply[1::2]), map(int, reply[2::2]), strict=True)))

    return Call("priorities", [], parse)


@dataclass(frozen=True, slots=True)
class Work:
    """The load of a queue, measured by the server, for autoscaling and for model swapping.

    Work is in output tokens. The fields are those of the script's reply, in order.
    """

    num_waiting: int = 0
    num_active: int = 0
    """Requests that workers hold."""
    num_running: int = 0
    """The most that ran at once in the last minute."""
    num_delayed: int = 0
    """Delayed requests that are due within `SOON_MS`."""
    oldest_ms: int = 0
    """The longest wait of the requests that are next in line."""
    num_workers: int = 0
    """Number of workers that claim. Draining workers do not count."""
    num_slots: int = 0
    """Requests that these workers take at once."""
    tokens_of_answer: float = 256.0
    """The mean length of the last answers."""
    tokens_of_worker: float = 0.0
    """Tokens that one worker generates in a second while requests wait; 0: not measured yet."""
    tokens_requested: float = 0.0
    """Tokens that clients request in a second: the highest average over half a minute in the last
    minute."""
    is_paused: bool = False
    front: float | None = None
    """The lowest score of a waiting request, made of priority and arrival; None if none waits."""
    deadlines_ms: list[int] = field(default_factory=list)
    """Time until the deadlines of requests that have one, the nearest first; at most 1,000."""

    @property
    def seconds_of_answer(self) -> float | None:
        """Seconds that one worker takes for an answer; None: not measured yet."""
        return self.tokens_of_answer / self.tokens_of_worker if self.tokens_of_worker else None


def measure_work(keys: Keys) -> Call[Work]:
    """Measures the load of a queue."""

    def parse(reply: list[Any]) -> Work:
        values: list[Any] = [*map(int, reply[:7]), *map(float, reply[7:10]), bool(reply[10])]
        values += [float(reply[11]) if reply[11] else None, [*map(int, reply[12:])]]
        return Work(*values)

    return Call("measure_work", [SOON_MS, _MOST_DEADLINES], parse, keys=keys)
