"""What all queues of a server share: which there are, and further names of their models.

These two keys belong to no queue. Workers add their queue, and `promptq models` sets aliases.
"""

from __future__ import annotations

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.keys import ALIASES, QUEUES, Keys
from promptq.shared.queue.call import Call, ids_of, text_map


def note_queue(queue: str) -> Call[int]:
    """Have gateways and clients find the queue."""
    return Call("", ["SADD", QUEUES, queue], int)


def forget_queue(queue: str) -> Call[int]:
    return Call("", ["SREM", QUEUES, queue], int)


def queue_names() -> Call[list[str]]:
    """The names, in order. What no queue may be called is left out, as a stranger wrote it."""

    def parse(found: list[bytes]) -> list[str]:
        return sorted(filter(_is_name, ids_of(found)))

    return Call("", ["SMEMBERS", QUEUES], parse, list)


def aliases() -> Call[dict[str, str]]:
    return Call("", ["HGETALL", ALIASES], text_map, dict)


def set_alias(alias: str, model: str) -> Call[int]:
    return Call("", ["HSET", ALIASES, alias, model], int)


def forget_alias(alias: str) -> Call[int]:
    return Call("", ["HDEL", ALIASES, alias], int)


def _is_name(name: str) -> bool:
    try:
        Keys(name)
    except ConfigurationError:
        return False
    return True
