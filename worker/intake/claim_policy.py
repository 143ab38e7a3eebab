"""How much a worker claims: what there is room for, and some work ahead."""

from __future__ import annotations

import math

from promptq.shared.protocol.claims import Room
from promptq.worker.engine_port import EnginePort
from promptq.worker.leases.leases import Leases

_WORK_AHEAD_SECONDS = 0.1
_MAX_DEPTH = 4096


class ClaimPolicy:
    """With `depth` None, the depth adapts to how fast requests are handed out: about 100 ms of work
    lie ready."""

    def __init__(self, leases: Leases, engine: EnginePort, depth: int | None = None) -> None:
        self._leases = leases
        self._engine = engine
        self._fixed_depth = depth

    @property
    def depth(self) -> int:
        """How many requests to keep ready beyond the free slots."""
        if self._fixed_depth is not None:
            return self._fixed_depth
        rate = self._leases.ready.hand_outs_a_second
        return max(1, min(math.ceil(rate * _WORK_AHEAD_SECONDS), _MAX_DEPTH))

    def room(self) -> Room:
        """The slots and the KV memory that no held request needs.

        A prefix that several sequences share is counted once, and no request counts for more than
        the model length. Both numbers are negative while urgent requests that will preempt are
        held, so that fewer sequences count as preemptible for further ones. There is no room beside
        a suspect, and none while the engine accepts nothing.
        """
        leases, limits = self._leases, self._engine.limits
        if leases.has_suspect or not self._engine.is_accepting:
            return Room(max_count=0, token_budget=0, num_held=len(leases))
        saved = self._engine.stats.num_saved_blocks * limits.block_size
        return Room(
            max_count=leases.num_places + self.depth - leases.num_counted,
            token_budget=limits.kv_tokens - leases.kv_need + saved,
            capacity=limits.max_model_len,
            preemptible=leases.preemptible,
            held=leases.by_tenant,
            num_held=len(leases) + self._engine.num_aborting,
        )
