"""Warns of a server that deletes keys when its memory is full, and with them parts of the queue.

`INFO memory` names the policy, and every role may send it. `CONFIG GET` is forbidden to roles and
on managed services.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from promptq.shared.queue.call import Call

_LOST = {
    "allkeys": "waiting and running requests may vanish, and nobody is notified",
    "volatile": "results, responses, batches and idempotency keys may vanish before their time",
}
"""The losses that a policy may cause, by the first word of its name."""


def eviction_warning() -> Call[str]:
    """A sentence about a server that may evict keys; empty if it evicts none or does not say."""
    return Call("", ["INFO", "memory"], warning_of, of_refusal=str)


def warning_of(info: Mapping[str, Any]) -> str:
    """The warning for a server's `INFO memory`."""
    policy = str(info.get("maxmemory_policy", ""))
    lost = _LOST.get(policy.partition("-")[0])
    if lost is None or not info.get("maxmemory"):
        return ""
    return (
        f"the server evicts keys when its memory is full (maxmemory-policy {policy}): {lost};"
        " set maxmemory-policy noeviction"
    )
