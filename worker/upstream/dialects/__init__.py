"""What is different from one inference server to another: one file for each kind."""

from __future__ import annotations

from typing import Any

from promptq.worker.engine.api.messages import EngineAbilities

_UNTOLD = frozenset(
    {
        "accepted_tokens",
        "cached_tokens",
        "drafted_tokens",
        "kv_bytes_per_token",
        "kv_cached_blocks",
        "kv_shared_blocks",
        "peak_memory_bytes",
        "recomputed_tokens",
        "step_ms",
    }
)
"""Statistics that no server tells for the part that a worker has of it."""


def server_abilities(*, unheeded: frozenset[str], **own: Any) -> EngineAbilities:
    """The abilities of a dialect: what all servers have in common, and its own."""
    return EngineAbilities(
        grammars=False,
        preempts_inexact=False,
        is_at_risk=False,
        untold=_UNTOLD,
        unheeded=unheeded | {"embed", "prompt_logprobs"},
        **own,
    )
