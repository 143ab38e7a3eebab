"""Calls that write and read a queue's statistics, and that measure its load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.worker_stats import SLOTS, Sample, SlotStats
from promptq.shared.queue.call import Call, named, text_map
from promptq.shared.queue.spoilt import readable

SOON_MS = 60_000
"""Delayed requests that are due within this many milliseconds count as load, because workers start
slowly."""
WINDOW_SECONDS = 30.0
"""Seconds over which `measure_work` averages the tokens that clients request."""
_MOST_DEADLINES = 1000


def slots(keys: Keys, worker_id: str) -> Call[tuple[int, list[SlotStats]]]:
    """Reads a worker's last report: the report's time (server ms; 0: no report) and the slots."""

    def parse(reply: list[Any]) -> tuple[int, list[SlotStats]]:
        reported_at, batch = reply
        return int(reported_at or 0), SLOTS.validate_json(batch or b"[]")

    reading = ["HMGET", keys.slots(worker_id), "told_at", "slots"]
    return Call("", reading, parse, lambda: (0, []))


@dataclass(slots=True)
class Contribution:
    """A worker's numbers since its last `sample` call, to be added to the queue's statistics."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    finished: int = 0
    first_token_ms: list[int] = field(default_factory=list)
    """Milliseconds from enqueueing to the first token, of each request that got its first token."""
    queue_ms: list[int] = field(default_factory=list)
    """Milliseconds from enqueueing to the first prefill, of the requests in `first_token_ms`."""
    overflow_tokens: int = 0
    """Tokens that an overflow worker generated. They do not count as the queue's speed."""

    def __bool__(self) -> bool:
        """Returns whether there is anything to add."""
        return self != Contribution()


def sample(part: Contribution) -> Call[int]:
    """Adds a worker's numbers to the sample of the current interval, and writes the last sample if
    its interval is over. Returns the number of written samples, 0 or 1."""
    args = named(
        generated_tokens=part.generated_tokens,
        prompt_tokens=part.prompt_tokens,
        finished=part.finished,
        ttft=" ".join(map(str, part.first_token_ms)),
        queue=" ".join(map(str, part.queue_ms)),
        overflow_tokens=part.overflow_tokens,
    )
    return Call("statistics", args, int)


def open_bucket(keys: Keys) -> Call[int]:
    """Reads the beginning (server ms) of the sample that is not finished yet; 0 if none."""
    reading = ["HGET", keys.statistics_open, "bucket"]
    return Call("", reading, lambda reply: int(reply or 0), int)


def samples(keys: Keys, since_ms: int, limit: int | None = None) -> Call[list[Sample]]:
    """Reads the samples since `since_ms`, oldest first; with `limit`, only the latest samples."""

    def parse(reply: list[Any]) -> list[Sample]:
        return readable(keys.statistics, reply, _sample_of)[::-1]

    count = () if limit is None else ("COUNT", limit)
    return Call("", ["XREVRANGE", keys.statistics, "+", since_ms, *count], parse, list)


def _sample_of(entry: tuple[bytes, Any]) -> Sample:
    entry_id, reply = entry
    return Sample.model_validate({**text_map(reply), "at": int(entry_id.split(b"-")[0])})


def priorities(keys: Keys) -> Call[dict[int, int]]:
    """Reads the number of waiting requests by priority.

    If a tenant has more waiting requests than 1,000 divided by the number of tenants, the numbers
    are estimates.
    """

    def parse(reply: list[int]) -> dict[int, int]:
        return dict(sorted(zip(map(int, reply[1::2]), map(int, reply[2::2]), strict=True)))

    return Call("priorities", [], parse)


@dataclass(frozen=True, slots=True)
class Work:
    """The load of a queue, measured by the server, for autoscaling and for model swapping.

    The load is counted in output tokens. The fields are those of the script's reply, in order.
    """

    num_waiting: int = 0
    num_active: int = 0
    """Number of requests that workers hold."""
    num_running: int = 0
    """The largest number of requests that ran at the same time in the last minute."""
    num_delayed: int = 0
    """Number of delayed requests that are due within `SOON_MS`."""
    oldest_ms: int = 0
    """Age in milliseconds of the oldest request, among the requests at the front of the queue."""
    num_workers: int = 0
    """Number of workers that claim requests; draining workers do not."""
    num_slots: int = 0
    """Number of requests that all claiming workers together can run at once."""
    tokens_of_answer: float = 256.0
    """Mean number of tokens in recent answers."""
    tokens_of_worker: float = 0.0
    """Tokens per second that one worker generates while requests wait; 0 if not measured yet."""
    tokens_requested: float = 0.0
    """Tokens per second that clients request: the highest half-minute average in the last minute.
    """
    tokens_waiting: float = 0.0
    """Expected number of output tokens of all waiting requests."""
    is_paused: bool = False
    front: float | None = None
    """The lowest score of a waiting request; None if no request waits."""
    deadlines_ms: list[int] = field(default_factory=list)
    """Milliseconds until the deadlines of requests, nearest first; at most 1,000 entries."""

    @property
    def seconds_of_answer(self) -> float | None:
        """Seconds in which one worker generates an average answer; None if not measured yet."""
        return self.tokens_of_answer / self.tokens_of_worker if self.tokens_of_worker else None


def measure_work(keys: Keys) -> Call[Work]:
    """Measures the load of a queue."""

    def parse(reply: list[Any]) -> Work:
        values: list[Any] = [*map(int, reply[:7]), *map(float, reply[7:11]), bool(reply[11])]
        values += [float(reply[12]) if reply[12] else None, [*map(int, reply[13:])]]
        return Work(*values)

    return Call("measure_work", [SOON_MS, _MOST_DEADLINES], parse, keys=keys)
