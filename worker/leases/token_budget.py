"""Decides how many requests a worker claims, and how many tokens they may need."""

from __future__ import annotations

import math

from promptq.shared.protocol.claims import Room
from promptq.worker.engine.api.port import EnginePort
from promptq.worker.leases.held_and_lost_leases import Leases

_WORK_AHEAD_SECONDS = 0.1
_MAX_DEPTH = 4096


class ClaimPolicy:
    """Decides how many requests to claim.

    `depth` is the number of ready requests to keep beyond the free slots. If `depth` is None, the
    worker keeps as many requests as the engine recently took in 100 ms. An overflow worker claims
    only for free slots.
    """

    def __init__(
        self,
        leases: Leases,
        engine: EnginePort,
        depth: int | None = None,
        *,
        is_overflow: bool = False,
    ) -> None:
        self._leases = leases
        self._engine = engine
        self._fixed_depth = 0 if is_overflow else depth
        self.is_overflow = is_overflow

    @property
    def depth(self) -> int:
        """Number of ready requests (claimed and prepared) to keep beyond the free slots."""
        if self._fixed_depth is not None:
            return self._fixed_depth
        rate = self._leases.ready.hand_outs_a_second
        return max(1, min(math.ceil(rate * _WORK_AHEAD_SECONDS), _MAX_DEPTH))

    def room(self) -> Room:
        """Returns the room for new claims: the slots and KV tokens that no held request needs.

        A prefix that several sequences share is counted once. If the worker holds urgent requests
        that will preempt running sequences, `max_count` and `token_budget` may be negative. Then
        further urgent requests can preempt only other sequences. There is no room while the worker
        holds a request that may crash the worker, or while the engine accepts no requests.
        """
        leases, limits = self._leases, self._engine.limits
        if leases.has_suspect or not self._engine.is_accepting:
            return Room(max_count=0, token_budget=0, num_held=len(leases))
        preemptible = [] if self.is_overflow else leases.preemptible
        stats = self._engine.stats
        saved = stats.num_saved_blocks * limits.block_size
        places = leases.num_places + self.depth if stats.max_running is None else stats.max_running
        return Room(
            max_count=places - leases.num_counted,
            token_budget=limits.kv_tokens - leases.kv_need + saved,
            capacity=limits.max_model_len,
            preemptible=[(holding.priority, holding.tokens) for holding in preemptible],
            held=leases.by_tenant(preemptible),
            num_held=len(leases) + self._engine.num_aborting,
            refused=self._engine.abilities.refused,
        )
