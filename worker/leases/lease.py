"""The lease of a request that this worker holds, and the states of a lease."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto

from promptq.shared.protocol.claims import Claim, Held
from promptq.shared.protocol.rows import Row
from promptq.worker.leases.rows import PreparedRequest


class LeaseState(IntEnum):
    """States of a lease, from the claim until the worker has nothing left to do for the request."""

    PREPARING = auto()
    READY = auto()
    """The request is prepared, and waits for a slot in the engine."""
    RUNNING = auto()
    """The request is in the engine."""
    ENDING = auto()
    """The engine has finished the request. The last row is on its way to the server."""
    RETURNING = auto()
    """The worker is giving the request back, and Redis has not confirmed the return yet."""
    GONE = auto()


@dataclass(slots=True, eq=False)
class Lease:
    """One attempt at a request, held by this worker. Only `Leases` changes the `state`."""

    claim: Claim
    state: LeaseState = LeaseState.PREPARING
    is_aside: bool = False
    """Whether the slow lane prepares the request. See `Leases.set_aside`."""
    is_blamed: bool = False
    """Whether giving the lease back counts as a crash of the request."""
    delay_ms: int | None = None
    """For this many milliseconds after its return to the queue, nobody can claim the request."""
    is_length_reported: bool = False
    """Whether the server has received the exact length of the prompt."""
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
        """Whether the worker still holds the request (the state is not GONE). The lease may have
        expired in Redis."""
        return self.state is not LeaseState.GONE

    @property
    def counts(self) -> bool:
        """Whether the request uses a slot and KV memory when the worker computes how much more it
        can claim."""
        return not (self.is_aside and self.state is LeaseState.PREPARING)

    @property
    def kv_need(self) -> int:
        """Number of KV tokens that the request is expected to need; 0 while `counts` is false."""
        if not self.counts:
            return 0
        prepared = self.prepared_or_none
        return self.claim.cost if prepared is None else prepared.kv_need

    @property
    def has_unreported_length(self) -> bool:
        """Whether the exact prompt length is known, and not yet reported to the server."""
        prepared = self.prepared_or_none
        return prepared is not None and prepared.is_length_known and not self.is_length_reported

    def with_unsent(self, row: Row) -> list[Row]:
        """Remove the request's unsent rows, and return a list of these rows and then `row`."""
        if (prepared := self.prepared_or_none) is None:
            return [row]
        unsent, prepared.unsent = prepared.unsent, []
        return [*unsent, row]

    def as_held(self) -> Held:
        """Returns the data that Redis needs to renew or end the lease. Includes the exact length of
        the prompt if Redis has not received the length yet."""
        length = self.prepared.num_prompt_tokens if self.has_unreported_length else None
        return Held(self.request_id, self.claim.fence, length)

    def reported(self, held: Held) -> None:
        """Record that Redis has received `held`, perhaps with the prompt's length."""
        self.is_length_reported = self.is_length_reported or held.prompt_tokens is not None
