"""All that this worker holds, and the timer that keeps the leases of it alive."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from redis.exceptions import RedisError

from promptq.shared.protocol.claims import Claim
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger
from promptq.worker.leases.lease import Lease

Leased = Lease | Claim
"""What a worker has a lease of: a claim, until it is prepared."""

RENEWALS_PER_LEASE = 4
_MAX_ASIDE = 64
_MAX_ASIDE_BYTES = 64 * 2**20
_TENANTS_ASIDE = 4
"""So many tenants have a place each, as one may take no more than its part of both."""


class Leases:
    """Held requests by their id and by the engine's, and claims that are being prepared."""

    def __init__(self) -> None:
        self._by_request: dict[str, Lease] = {}
        self._by_sequence: dict[int, Lease] = {}
        self._claims: dict[str, Claim] = {}
        self._aside: dict[str, Claim] = {}  # of the claims, those that count for nothing yet
        self._in_engine: Counter[int] = Counter()  # by priority
        self.num_in_engine = 0

    def __len__(self) -> int:
        return len(self._by_request) + len(self._claims)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._by_request.values()))

    def add_claims(self, claims: Iterable[Claim]) -> None:
        """Hold claims until `add` has what was made of them, or until they are dropped."""
        claims = list(claims)
        for claim in claims:
            self._aside.pop(claim.request_id, None)
        self._claims.update({claim.request_id: claim for claim in claims})

    def set_aside(self, claim: Claim) -> bool:
        """Count a claim for nothing until it is prepared, so that it keeps nobody out meanwhile.

        Only a few are, and of one tenant a part of these, as the worker's room does not bound what
        they hold in memory. Gives whether it is one of them.
        """
        others = list(self._aside.values())
        same = [it for it in others if it.tenant == claim.tenant]
        for claims, part in ((others, 1), (same, _TENANTS_ASIDE)):
            num_bytes = len(claim.payload) + sum(len(it.payload) for it in claims)
            if len(claims) >= _MAX_ASIDE // part or num_bytes > _MAX_ASIDE_BYTES // part:
                return False
        self._aside[claim.request_id] = claim
        return True

    @property
    def claims(self) -> list[Claim]:
        """What was claimed and is not prepared yet."""
        return list(self._claims.values())

    def has_claim(self, claim: Claim) -> bool:
        """Whether it is held still and not prepared yet. For any thread."""
        return self._claims.get(claim.request_id) is claim

    def has(self, held: Leased) -> bool:
        """Whether this very one is held."""
        if isinstance(held, Claim):
            return self.has_claim(held)
        return held.sequence_id in self._by_sequence

    def add(self, held: Lease) -> None:
        self._claims.pop(held.request_id, None)
        self._aside.pop(held.request_id, None)
        self._by_request[held.request_id] = held
        self._by_sequence[held.sequence_id] = held

    def drop(self, held: Leased) -> None:
        """Hold it no longer; doing it twice does no harm."""
        if isinstance(held, Claim):
            if self.has_claim(held):
                del self._claims[held.request_id]
                self._aside.pop(held.request_id, None)
            return
        if self._by_sequence.pop(held.sequence_id, None) is None:
            return
        if self._by_request.get(held.request_id) is held:
            del self._by_request[held.request_id]
        self.mark_out_of_engine(held)
        held.ended = True

    def mark_in_engine(self, held: Lease) -> None:
        held.in_engine = True
        self.num_in_engine += 1
        self._in_engine[held.priority] += 1

    def mark_out_of_engine(self, held: Lease) -> None:
        if held.in_engine:
            held.in_engine = False
            self.num_in_engine -= 1
            self._in_engine[held.priority] -= 1
            if not self._in_engine[held.priority]:
                del self._in_engine[held.priority]

    def by_request(self, request_id: str) -> Lease | None:
        return self._by_request.get(request_id)

    def by_sequence(self, sequence_id: int) -> Lease | None:
        return self._by_sequence.get(sequence_id)

    @property
    def num_counted(self) -> int:
        """Held requests that take a place."""
        return len(self) - len(self._aside)

    @property
    def kv_need(self) -> int:
        """KV tokens that all held requests are counted with."""
        claimed = sum(it.cost for it in self._claims.values() if it.request_id not in self._aside)
        return claimed + sum(held.kv_need for held in self._by_request.values())

    @property
    def has_suspect(self) -> bool:
        """Whether something is held that must have the worker to itself."""
        claims = [*self._claims.values(), *(held.claim for held in self._by_request.values())]
        return any(claim.is_suspect for claim in claims)

    def has_less_urgent_in_engine(self, priority: int) -> bool:
        """Whether a request of this priority would find somebody to preempt."""
        return any(other > priority for other in self._in_engine)

    @property
    def preemptible(self) -> list[tuple[int, int]]:
        """(priority, KV tokens) of what is in the engine."""
        return [
            (held.priority, held.kv_need) for held in self._by_request.values() if held.in_engine
        ]


async def keep_alive(
    leases: Leases,
    lease_ms: int,
    renew: Callable[[list[Leased]], Awaitable[None]],
    is_stuck: Callable[[], bool],
) -> None:
    """Renew all leases several times a lease, as long as there is progress."""
    log = get_logger()
    while True:
        await asyncio.sleep(lease_ms / 1000 / RENEWALS_PER_LEASE)
        if is_stuck():
            log.error("no progress; leases are left to run out", held=len(leases))
        elif held := [*leases, *leases.claims]:
            await renew(held)


async def release(
    queue: AsyncRequestQueue,
    leases: Leases,
    held: Sequence[Leased],
    *,
    crashed: bool = False,
    delays_ms: Sequence[int] = (),
) -> None:
    """Give requests back to the queue, with their progress; `crashed` counts against each.

    With `delays_ms`, one for each, nobody gets them again before that.

    They are held until the server has taken them: who fails here goes on renewing, or tries again.
    """
    try:
        await queue.release([item.as_held() for item in held], crashed=crashed, delays_ms=delays_ms)
    except (RedisError, OSError):
        for item in held:  # perhaps not told; to tell it twice does no harm
            if isinstance(item, Lease):
                item.prompt_tokens_told = False
        raise
    for item in held:
        leases.drop(item)
