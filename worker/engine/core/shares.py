"""Counts tenants' sequences, and computes each tenant's share of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from promptq.worker.engine.api.messages import EngineRequest


class TenantCounts(dict[str, int]):
    """The number of sequences of each tenant. A tenant without any has no entry."""

    def add(self, tenant: str) -> None:
        self[tenant] = self.get(tenant, 0) + 1

    def remove(self, tenant: str) -> None:
        self[tenant] -= 1
        if not self[tenant]:
            del self[tenant]


class Shares:
    """Each tenant's part of the slots or of the KV cache, whichever is larger, divided by its
    weight (dominant resource fairness, Ghodsi et al., NSDI 2011).

    `running` yields the running requests, each with its number of blocks.
    """

    def __init__(
        self, num_slots: int, num_blocks: int, running: Iterable[tuple[EngineRequest, int]]
    ) -> None:
        self._num_slots, self._num_blocks = num_slots, num_blocks
        self._slots: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()
        for request, blocks in running:
            self._slots[request.tenant] += 1
            self._blocks[request.tenant] += blocks

    def of_tenant(self, request: EngineRequest) -> float:
        """Returns the share of the request's tenant."""
        return self._share(request, 0, 0)

    def may_make_room(
        self, victim: EngineRequest, blocks: int, newcomer: EngineRequest, needed: int
    ) -> bool:
        """Whether the tenant of `victim`, without its `blocks`, still has at least the share that
        the tenant of `newcomer` has with the needed blocks.

        So no tenant falls below its share, and a tenant that made room cannot take the room back.
        """
        return self._share(victim, -1, -blocks) >= self._share(newcomer, 1, needed)

    def remove(self, request: EngineRequest, blocks: int) -> None:
        self._slots[request.tenant] -= 1
        self._blocks[request.tenant] -= blocks

    def _share(self, request: EngineRequest, slots: int, blocks: int) -> float:
        slots += self._slots[request.tenant]
        blocks += self._blocks[request.tenant]
        return max(slots / self._num_slots, blocks / self._num_blocks) / request.weight
