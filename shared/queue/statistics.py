"""Calls that write and read statistics for people: a worker's batch, and a queue's statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.worker_stats import SLOTS, Sample, SlotStats
from promptq.shared.queue.call import Call, named, text_map
from promptq.shared.queue.spoilt import readable


def slots(keys: Keys, worker_id: str) -> Call[tuple[int, list[SlotStats]]]:
    """When a worker last reported its batch (server time in ms, 0: never), and the batch."""

    def parse(reply: list[Any]) -> tuple[int, list[SlotStats]]:
        told_at, batch = reply
        return int(told_at or 0), SLOTS.validate_json(batch or b"[]")

    reading = ["HMGET", keys.slots(worker_id), "told_at", "slots"]
    return Call("", reading, parse, lambda: (0, []))


@dataclass(slots=True)
class Contribution:
    """What a worker adds to the queue's statistics: all since the last time."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    finished: int = 0
    first_token_ms: list[int] = field(default_factory=list)
    """From enqueueing to the first token, of each request that got it."""
    queue_ms: list[int] = field(default_factory=list)
    """From enqueueing to the first prefill, of the same requests."""


def sample(part: Contribution) -> Call[int]:
    """Add to the statistics, and write the sample whose time is over, even if nothing is added.
    Returns how many samples were written."""
    args = named(
        generated_tokens=part.generated_tokens,
        prompt_tokens=part.prompt_tokens,
        finished=part.finished,
        ttft=" ".join(map(str, part.first_token_ms)),
        queue=" ".join(map(str, part.queue_ms)),
    )
    return Call("statistics", args, int)


def samples(keys: Keys, since_ms: int, limit: int | None = None) -> Call[list[Sample]]:
    """Samples from `since_ms` on, the oldest first; with `limit` the latest of them."""

    def parse(reply: list[Any]) -> list[Sample]:
        found = readable(keys.statistics, reply, _sample_of)
        return found if limit is None else found[::-1]

    if limit is None:
        return Call("", ["XRANGE", keys.statistics, since_ms, "+"], parse, list)
    return Call("", ["XREVRANGE", keys.statistics, "+", since_ms, "COUNT", limit], parse, list)


def _sample_of(entry: tuple[bytes, Any]) -> Sample:
    entry_id, reply = entry
    return Sample.model_validate({**text_map(reply), "at": int(entry_id.split(b"-")[0])})


def priorities(keys: Keys) -> Call[dict[int, int]]:
    """How many wait at each priority; an estimate if more than some hundreds wait."""

    def parse(reply: list[int]) -> dict[int, int]:
        return dict(sorted(zip(map(int, reply[1::2]), map(int, reply[2::2]), strict=True)))

    return Call("priorities", [], parse)
