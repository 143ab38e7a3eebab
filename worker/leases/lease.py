"""A request that this worker holds, and where it is in its life."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from promptq.shared.protocol.claims import Claim, Held
from promptq.worker.leases.prepared_request import PreparedRequest


class LeaseState(Enum):
    """From a claim to the moment at which this worker has nothing to do with it any more."""

    PREPARING = auto()
    READY = auto()
    """It waits for a place in the engine."""
    RUNNING = auto()
    """It is in the engine."""
    ENDING = auto()
    """Nothing more comes from the engine; the last that came is on its way to the server."""
    RETURNING = auto()
    """It is to be given back to the queue."""
    GONE = auto()


@dataclass(slots=True, eq=False)
class Lease:
    """What is held of one attempt at a request. `Leases` alone changes its state."""

    claim: Claim
    state: LeaseState = LeaseState.PREPARING
    is_aside: bool = False
    """Whether it counts for nothing until it is prepared."""
    is_blamed: bool = False
    """Whether giving it back counts as a crash of it."""
    delay_ms: int | None = None
    """For how long nobody gets it again once it is given back."""
    is_length_told: bool = False
    """Whether the server knows the exact length of its prompt."""
    prepared_or_none: PreparedRequest | None = None

    @property
    def request_id(self) -> str:
        return self.claim.request_id

    @property
    def prepared(self) -> PreparedRequest:
        """What was made of the claim. Raises RuntimeError while it is being prepared."""
        if self.prepared_or_none is None:
            raise RuntimeError(f"{self.request_id} is not prepared")
        return self.prepared_or_none

    @property
    def is_held(self) -> bool:
        """Whether the server still counts it as this worker's, as far as is known here."""
        return self.state is not LeaseState.GONE

    @property
    def counts(self) -> bool:
        """Whether it takes a place and KV."""
        return not (self.is_aside and self.state is LeaseState.PREPARING)

    @property
    def kv_need(self) -> int:
        """Tokens of KV it is counted with."""
        if not self.counts:
            return 0
        prepared = self.prepared_or_none
        return self.claim.cost if prepared is None else prepared.kv_need

    @property
    def has_untold_length(self) -> bool:
        """Whether the exact length of its prompt is known here, and not yet to the server."""
        return self.prepared_or_none is not None and not self.is_length_told

    def as_held(self) -> Held:
        """What renews it or gives it back, and tells the prompt's exact length if it is untold."""
        length = self.prepared.num_prompt_tokens if self.has_untold_length else None
        return Held(self.request_id, self.claim.fence, length)

    def told(self, held: Held) -> None:
        """The server has taken this."""
        self.is_length_told = self.is_length_told or held.prompt_tokens is not None
