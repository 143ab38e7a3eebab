"""All leases that this worker holds. Only this module changes the state of a lease.

Several calls to Redis run at the same time, and a thread may still prepare a request whose lease is
already lost. So a report about a lease may come too late, and then has no effect. A change of state
that is not in `_NEXT` raises RuntimeError.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum

from promptq.shared.protocol.claims import Claim, Holding
from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.rows import RowStatus
from promptq.worker.engine.api.port import EnginePort
from promptq.worker.leases.lease import Lease, LeaseState
from promptq.worker.leases.ready import ReadyQueue, WakeUp
from promptq.worker.leases.rows import PreparedRequest

_PREPARING, _READY, _RUNNING, _ENDING, _RETURNING, _GONE = LeaseState
_NEXT = {
    _PREPARING: {_READY, _ENDING, _RETURNING, _GONE},
    _READY: {_RUNNING, _RETURNING, _GONE},
    _RUNNING: {_ENDING, _RETURNING, _GONE},
    _ENDING: {_RETURNING, _GONE},
    _RETURNING: {_GONE},
    _GONE: set[LeaseState](),
}
_MAX_ASIDE = 64
_MAX_ASIDE_BYTES = 64 * 2**20
_TENANTS_ASIDE = 4  # a tenant may use a quarter of each limit


class Exit(StrEnum):
    """Ways in which a request leaves a worker before the request's end."""

    FENCED = "fenced"
    """Redis refused the lease: another attempt holds the request, or no attempt holds it."""
    GIVEN_BACK = "given_back"
    FAILED = "error"
    """The attempt counts as a crash of the request, or the request's log accepts no events."""

    @classmethod
    def of(cls, lease: Lease) -> Exit:
        """Returns FAILED if the return counts as a crash of the request, otherwise GIVEN_BACK."""
        return cls.FAILED if lease.is_blamed else cls.GIVEN_BACK


Outcome = FinishReason | Exit


class Leases:
    """All leases of a worker, by request and by sequence. Makes every change of a lease's state.

    `answered` and `released` act on an answer of Redis, and return the attempt's outcome if the
    answer reports one, otherwise None. Redis reports each outcome only once. So the caller must
    record an outcome even if the lease is already GONE.
    """

    def __init__(self, engine: EnginePort) -> None:
        limits = engine.limits
        self.num_places = limits.max_num_seqs + max(1, limits.max_num_seqs // 8)
        """The most requests in the engine at a time. The engine gets a few more requests than it
        has slots, so that the first step after a slot becomes free can use the slot."""
        self.ready = ReadyQueue()
        self.wake_up = WakeUp()
        self.some_return = asyncio.Event()
        """Set when a lease changes to RETURNING. `Exchange.give_back` clears the event."""
        self._engine = engine
        self._by_request: dict[str, Lease] = {}
        self._running: dict[int, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._by_request.values()))

    def by_request(self, request_id: str) -> Lease | None:
        return self._by_request.get(request_id)

    def by_sequence(self, sequence_id: int) -> Lease | None:
        """Returns the lease of a sequence that runs in the engine; None if there is none."""
        return self._running.get(sequence_id)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def due_back(self) -> list[Lease]:
        """The leases whose requests go back to the queue (state RETURNING)."""
        return [lease for lease in self if lease.state is _RETURNING]

    @property
    def is_busy(self) -> bool:
        """Whether a lease is RUNNING, ENDING or RETURNING."""
        return any(lease.state in (_RUNNING, _ENDING, _RETURNING) for lease in self)

    # ------------------------------------------------------------ events

    def claimed(self, claims: Iterable[Claim]) -> list[Lease]:
        """Add and return a lease for each claim. Leases of earlier attempts become GONE."""
        leases = [Lease(claim) for claim in claims]
        for lease in leases:
            if (earlier := self._by_request.get(lease.request_id)) is not None:
                self._set_state(earlier, _GONE)
            self._by_request[lease.request_id] = lease
        return leases

    def set_aside(self, lease: Lease) -> bool:
        """Set a lease aside for the slow lane. The lease counts for no slot or KV memory until its
        request is prepared.

        Returns False if too many requests, or too many bytes of payloads, would be set aside: for
        all tenants together, or for this tenant.
        """
        claim = lease.claim
        others = [other.claim for other in self if not other.counts]
        same = [other for other in others if other.tenant == claim.tenant]
        for claims, part in ((others, 1), (same, _TENANTS_ASIDE)):
            num_bytes = len(claim.payload) + sum(len(other.payload) for other in claims)
            if len(claims) >= _MAX_ASIDE // part or num_bytes > _MAX_ASIDE_BYTES // part:
                return False
        lease.is_aside = True
        return True

    def prepared(self, lease: Lease, prepared: PreparedRequest) -> None:
        """Store a prepared request in its lease. The lease becomes READY, or ENDING if the request
        is complete.

        Has no effect if the lease is lost or is being given back.
        """
        if lease.state is _PREPARING:
            lease.prepared_or_none = prepared
            self._set_state(lease, _ENDING if prepared.is_at_end else _READY)

    def feed(self) -> None:
        """Hand ready requests to the engine while it has free slots. Then also hand over ready
        requests that may preempt running requests."""
        while (lease := self._next_to_run()) is not None:
            self._set_state(lease, _RUNNING)
        self.wake_up.room_freed()

    def ending(self, lease: Lease, *, by_engine: bool = False) -> None:
        """Record that the worker is sending the last row of the request to the server.

        `by_engine` is True if the engine has already removed the sequence.
        """
        self._set_state(lease, _ENDING, is_removed=by_engine)

    def returning(
        self, lease: Lease, *, crashed: bool = False, delay_ms: int | None = None
    ) -> None:
        """Schedule the return of the request to the queue.

        With `crashed`, the return counts as a crash of the request. After the return, no worker can
        claim the request for `delay_ms` milliseconds. Has no effect on GONE or RETURNING leases.
        """
        if lease.state not in (_RETURNING, _GONE):
            lease.is_blamed, lease.delay_ms = crashed, delay_ms
            self._set_state(lease, _RETURNING)

    def answered(self, lease: Lease, status: RowStatus, reason: str = "") -> Outcome | None:
        """Act on Redis's answer about a lease or a row. Returns the attempt's outcome, if known.

        `reason` is the finish reason if the answer is about the last row, otherwise empty.
        """
        was_held = lease.is_held
        if status.is_lost or reason:
            if lease.state is _RETURNING and status in (RowStatus.FENCED, RowStatus.FINISHED):
                return None  # the call that gives the lease back gets the outcome
            if status is RowStatus.GAP:
                self.returning(lease)
                return None
            if was_held:
                self._set_state(lease, _GONE)
        match status:
            case RowStatus.CANCELLED | RowStatus.EXPIRED:
                return FinishReason(status)
            case RowStatus.OK | RowStatus.DUPLICATE if reason:
                return FinishReason(reason)
            case RowStatus.FENCED if was_held:
                return Exit.FENCED
            case RowStatus.ERROR if was_held:
                return Exit.FAILED
        return None

    def released(self, lease: Lease, status: str) -> Outcome | None:
        """Act on `status`, Redis's answer when the worker puts the request back into the queue.
        Returns the attempt's outcome; None if the status does not tell it."""
        was_held = lease.is_held
        if was_held and lease.state is not _RETURNING:
            raise RuntimeError(f"{lease.request_id} is not on its way back")
        if was_held:
            self._set_state(lease, _GONE)
        match status:
            case "waiting" | "dead":
                return Exit.of(lease)
            case "cancelled":
                return FinishReason.CANCELLED
            case "fenced" if was_held:
                return Exit.FENCED
        return None

    # ------------------------------------------------------------ counts

    @property
    def num_counted(self) -> int:
        """Number of held requests that count for a slot. Requests in the slow lane do not count."""
        return sum(lease.counts for lease in self)

    @property
    def kv_need(self) -> int:
        """Number of KV tokens that all held requests together are expected to need."""
        return sum(lease.kv_need for lease in self)

    @property
    def has_suspect(self) -> bool:
        """Whether other workers crashed while they held a request that this worker holds now. With
        such a request, the worker claims nothing else."""
        return any(lease.claim.is_suspect for lease in self)

    @property
    def preemptible(self) -> list[Holding]:
        """The running sequences that a more urgent request may preempt, one `Holding` for each."""
        return [
            Holding(lease.prepared.priority, 1, lease.prepared.kv_need, lease.claim.tenant)
            for lease in self._preemptible_leases
        ]

    def by_tenant(self, preemptible: Iterable[Holding]) -> list[Holding]:
        """Returns the number of sequences and tokens in `preemptible`, summed for each priority and
        tenant. Each tenant with a held request has an entry, perhaps with zeros."""
        by_level = {(0, lease.claim.tenant): (0, 0) for lease in self._by_request.values()}
        for priority, num_running, tokens, tenant in preemptible:
            numbers = by_level.get((priority, tenant), (0, 0))
            by_level[priority, tenant] = numbers[0] + num_running, numbers[1] + tokens
        return [
            Holding(priority, *numbers, tenant) for (priority, tenant), numbers in by_level.items()
        ]

    def _next_to_run(self) -> Lease | None:
        lease = self.ready.first()
        if self.num_running < self.num_places:
            self.ready.num_empty += lease is None
            return lease
        if lease is None or any(
            other.prepared.priority > lease.prepared.priority for other in self._preemptible_leases
        ):
            return lease
        lease = self.ready.first_of_others({other.claim.tenant for other in self._running.values()})
        if lease is None:
            return None
        # The engine decides whether one of these tenants has more than its fair share of slots.
        num_slots = Counter(
            other.claim.tenant
            for other in self._preemptible_leases
            if other.prepared.priority >= lease.prepared.priority
        )
        return lease if max(num_slots.values(), default=0) > 1 else None

    @property
    def _preemptible_leases(self) -> Iterator[Lease]:
        may_preempt = self._engine.abilities.may_preempt
        return (
            each
            for each in self._running.values()
            if may_preempt(each.prepared.request, each.prepared.token_ids)
        )

    def _set_state(self, lease: Lease, state: LeaseState, *, is_removed: bool = False) -> None:
        # `is_removed`: the engine has already removed the sequence, so it needs no abort.
        before = lease.state
        if state not in _NEXT[before]:
            raise RuntimeError(f"{lease.request_id} cannot go from {before.name} to {state.name}")
        lease.state = state
        if before is _READY:
            self.ready.remove(lease, is_handed_out=state is _RUNNING)
        elif before is _RUNNING:
            del self._running[lease.prepared.sequence_id]
            if not is_removed:
                self._engine.abort(lease.prepared.sequence_id)
        if state is _READY:
            self.ready.add(lease)
        elif state is _RUNNING:
            self._running[lease.prepared.sequence_id] = lease
            self._engine.add(lease.prepared.engine_request)
        elif state is _RETURNING:
            self.some_return.set()
        elif state is _GONE:
            del self._by_request[lease.request_id]
