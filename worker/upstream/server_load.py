"""Reads from the metrics of an inference server the load of all its clients together."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass

from promptq.shared.errors import ConfigurationError
from promptq.worker.upstream.dialects.transport import RefusedError, Server, malformed_as_fault

_KINDS = (
    # Running requests; waiting ones, the best metric first; used share of the KV cache.
    (
        "vllm:num_requests_running",
        ("vllm:num_requests_waiting_by_reason", "vllm:num_requests_waiting"),
        "vllm:kv_cache_usage_perc",
    ),
    ("llamacpp:requests_processing", ("llamacpp:requests_deferred",), ""),
    ("sglang:num_running_reqs", ("sglang:num_queue_reqs",), "sglang:token_usage"),
)
_LINE = re.compile(r"^(\w+:\w+)(\{.*\})? (\S+)", re.MULTILINE)
_OTHER_REASON = re.compile(r'reason="(?!capacity")')


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of a server: its numbers of requests, from all clients, and its used memory."""

    num_running: float
    num_waiting: float = 0.0
    """Number of requests for which the server has no room."""
    used_share: float = 0.0
    """Used part of the KV cache or of the slots, from 0 to 1."""

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be a number of requests."""
        for value in (self.num_running, self.num_waiting, self.used_share):
            if not 0 <= value < math.inf:
                raise ValueError(f"{value!r} is no load")


async def read_load(server: Server) -> ServerLoad | None:
    """Returns the load of a server; None if the server does not report it.

    llama.cpp without `--metrics` reports its slots, but not the requests that wait for a slot.
    Raises ServerFaultError, OverloadedError.
    """
    with suppress(RefusedError, ConfigurationError), malformed_as_fault():
        if (load := _from_metrics(str(await server.get("/metrics")))) is not None:
            return load
    with suppress(RefusedError, ConfigurationError), malformed_as_fault():
        slots = [bool(slot["is_processing"]) for slot in await server.get("/slots")]
        return ServerLoad(sum(slots), used_share=sum(slots) / len(slots))
    return None


def _from_metrics(text: str) -> ServerLoad | None:
    values = defaultdict[str, list[float]](list)  # one for each engine of a server
    for name, labels, value in _LINE.findall(text):
        if not _OTHER_REASON.search(labels):
            values[name].append(float(value))
    for running, waiting, share in _KINDS:
        if running in values:
            counts = next((values[name] for name in waiting if name in values), [])
            return ServerLoad(sum(values[running]), sum(counts), max(values[share], default=0.0))
    return None
