"""Counts the sequences of tenants, and computes each tenant's share of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile

from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.sequence import Sequence


class TenantCounts(dict[str, int]):
    """The number of sequences of each tenant. A tenant without sequences has no entry."""

    def add(self, tenant: str) -> None:
        self[tenant] = self.get(tenant, 0) + 1

    def remove(self, tenant: str) -> None:
        self[tenant] -= 1
        if not self[tenant]:
            del self[tenant]

    def in_turn(self, sequences: list[Sequence]) -> list[Sequence]:
        """Returns the sequences in the order in which their prompts are computed. The sequences are
        sorted by priority. Within a priority, the first sequence of each tenant comes before the
        second sequence of any tenant."""
        if len(self) < 2:
            return sequences
        numbers: Counter[tuple[int, str]] = Counter()

        def turn(sequence: Sequence) -> tuple[int, int]:
            priority, tenant = sequence.request.priority, sequence.request.tenant
            numbers[priority, tenant] += 1
            return priority, numbers[priority, tenant]

        return sorted(sequences, key=turn)


class TenantShares:
    """Computes each tenant's share. The share is the tenant's fraction of the slots or of the KV
    blocks, whichever is larger, divided by the tenant's weight. Source: dominant resource fairness
    (Ghodsi et al., NSDI 2011).

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
        """Whether `victim` may be preempted for `newcomer`. The victim has `blocks` blocks, and the
        newcomer needs `needed` blocks. After the preemption, the share of the newcomer's tenant
        must not be larger than the share of the victim's tenant.

        So each tenant keeps its fair share, and two tenants cannot preempt each other in turn.
        """
        return self._share(victim, -1, -blocks) >= self._share(newcomer, 1, needed)

    def remove(self, request: EngineRequest, blocks: int) -> None:
        self._slots[request.tenant] -= 1
        self._blocks[request.tenant] -= blocks

    def _share(self, request: EngineRequest, slots: int, blocks: int) -> float:
        slots += self._slots[request.tenant]
        blocks += self._blocks[request.tenant]
        return max(slots / self._num_slots, blocks / self._num_blocks) / request.weight


def last_of_most(running: list[Sequence], shares: TenantShares) -> Sequence:
    """Returns the sequence to preempt from `running`, which is sorted by urgency. Candidates are
    the sequences with the least urgent priority, except the first of `running`. Returns the last
    candidate of the tenant with the largest share."""
    priority = running[-1].request.priority
    lesser = takewhile(lambda each: each.request.priority == priority, reversed(running[1:]))
    return max(lesser, key=lambda sequence: shares.of_tenant(sequence.request))


def beyond_their_share(
    running: list[Sequence], shares: TenantShares, newcomer: EngineRequest, num_needed: int
) -> Iterator[Sequence]:
    """Yields the running sequences to preempt for `newcomer`, which needs `num_needed` blocks. Each
    time, chooses the last sequence of the tenant with the largest remaining share. No tenant falls
    below its fair share."""
    by_tenant: dict[str, list[Sequence]] = {}
    for sequence in running:
        if sequence.request.priority >= newcomer.priority:
            by_tenant.setdefault(sequence.request.tenant, []).append(sequence)
    while by_tenant:
        most = max(by_tenant.values(), key=lambda each: shares.of_tenant(each[-1].request))
        request, num_blocks = most[-1].request, len(most[-1].block_table)
        if shares.may_make_room(request, num_blocks, newcomer, num_needed):
            shares.remove(request, num_blocks)
            yield most.pop()
        else:
            most.clear()
        if not most:
            del by_tenant[request.tenant]
