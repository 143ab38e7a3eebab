"""A request that this worker holds, and where it is in its life."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from promptq.shared.protocol.claims import Claim, Held
from promptq.shared.protocol.rows import Row
from promptq.worker.leases.rows import PreparedRequest


class LeaseState(Enum):
    """The life of a lease, from its claim until this worker has no more to do with it."""

    PREPARING = auto()
    READY = auto()
    """The request is prepared, and waits for a place in the engine."""
    RUNNING = auto()
    """The request is in the engine."""
    ENDING = auto()
    """The engine is done with the request, and its last row is on its way to the server."""
    RETURNING = auto()
    """The worker is about to give the request back to the queue."""
    GONE = auto()


@dataclass(slots=True, eq=False)
class Lease:
    """One attempt at a request, held by this worker. Only `Leases` changes its state."""

    claim: Claim
    state: LeaseState = LeaseState.PREPARING
    is_aside: bool = False
    """Whether the request takes no room until it is prepared."""
    is_blamed: bool = False
    """Whether giving the lease back counts as a crash of the request."""
    delay_ms: int | None = None
    """How long nobody can claim the request after its return to the queue."""
    is_length_reported: bool = False
    """Whether the server knows the exact length of the prompt."""
    prepared_or_none: PreparedRequest | None = None

    @property
    def request_id(self) -> str:
        return self.claim.request_id

    @property
    def prepared(self) -> PreparedRequest:
        """The prepared request. Raises RuntimeError before preparation is done."""
        if self.prepared_or_none is None:
            raise RuntimeError(f"{self.request_id} is not prepared")
        return self.prepared_or_none

    @property
    def is_held(self) -> bool:
        """Whether this worker still holds the request, as far as it knows."""
        return self.state is not LeaseState.GONE

    @property
    def counts(self) -> bool:
        """Whether the request takes a place and KV memory."""
        return not (self.is_aside and self.state is LeaseState.PREPARING)

    @property
    def kv_need(self) -> int:
        """The number of KV tokens that the request counts for."""
        if not self.counts:
            return 0
        prepared = self.prepared_or_none
        return self.claim.cost if prepared is None else prepared.kv_need

    @property
    def has_unreported_length(self) -> bool:
        """Whether this worker knows the exact prompt length and the server does not yet."""
        return self.prepared_or_none is not None and not self.is_length_reported

    def with_unsent(self, row: Row) -> list[Row]:
        """Returns the rows that must be sent before this one, and then this row."""
        if (prepared := self.prepared_or_none) is None:
            return [row]
        unsent, prepared.unsent = prepared.unsent, []
        return [*unsent, row]

    def as_held(self) -> Held:
        """Returns the form that renews or gives back the lease. The form has the prompt length if
        the server does not know the length yet."""
        length = self.prepared.num_prompt_tokens if self.has_unreported_length else None
        return Held(self.request_id, self.claim.fence, length)

    def reported(self, held: Held) -> None:
        """Note that the server has received `held`."""
        self.is_length_reported = self.is_length_reported or held.prompt_tokens is not None
