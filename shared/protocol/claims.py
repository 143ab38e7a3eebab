"""Arguments and result of a claim: a worker's free room, and the requests that the worker gets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.output_style import OutputStyle


class Holding(NamedTuple):
    """Number and KV tokens of the sequences that one tenant runs at a worker with one priority.

    Only preemptible sequences count, so both are 0 for a tenant that has no preemptible sequence.
    """

    priority: int
    num_running: int
    tokens: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Room:
    """A worker's room for requests.

    - `capacity`: the most KV tokens that one request may take.
    - `preemptible`: (priority, KV tokens) of running sequences that a more urgent one may preempt.
    - `num_held`: number of requests that the worker holds. A request suspected of earlier crashes
      goes only to a worker that holds no other request.
    - `num_sharing`: number of workers that share the waiting requests. A claim fills this worker up
      to an equal share of all waiting and held requests. A worker that holds its share may still
      claim a quarter of an equal share of the waiting requests.
    - `held`: what each tenant runs at this worker. A tenant that runs nothing here gets a place
      even at a full worker, if another tenant exceeds its fair share.
    - `refused`: the fields of a request that the worker's engine cannot serve.
    """

    max_count: int
    token_budget: int
    capacity: int = 2**53
    preemptible: Sequence[tuple[int, int]] = ()
    num_held: int = 0
    num_sharing: int = 1
    held: Sequence[Holding] = ()
    refused: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model that all workers of a queue must have. An empty field matches every model."""

    name: str = ""
    fingerprint: str = ""
    output_style: OutputStyle | None = None
    """The model's style for tool calls and reasoning; None if there is no model."""


@dataclass(frozen=True, slots=True)
class ClaimContext:
    """Facts about this worker's earlier claims, by which the server notices that a reply was lost.

    `session` is a random id of this queue object; if empty, the server notices no lost reply.
    `answered` is the nonce of the last claim whose reply had requests. `number` counts the claims.
    `skip` is the number of requests to pass over. See `promptq.shared.queue.claim_history`.
    """

    session: str = ""
    answered: str = ""
    skip: int = 0
    number: int = 0


@dataclass(slots=True)
class Claim:
    """A claimed request. Later calls send `fence` to prove that they belong to this attempt."""

    request_id: str
    payload: bytes
    fence: str
    attempt: int
    score: float
    seed: int
    enqueued_at_ms: int
    claimed_at_ms: int
    prompt_tokens: int | None
    """Exact number of tokens of the prompt; None if no attempt has tokenised the prompt yet."""
    cost: int
    """Expected number of KV tokens; the claim counts it against the worker's budget."""
    events: list[TokenEvent] = field(default_factory=list)
    """The events of earlier attempts."""
    is_spoilt: bool = False
    """Whether the log has an entry that is not an event. No attempt can continue such a request."""
    turn: tuple[float, str] | None = None
    """Sort key among the requests of all tenants: the lowest score of all waiting requests when
    this one was claimed, then the claim's time and the request's place in the claim. None if the
    queue has no tenants."""
    tenant: str = ""
    """Tenant in whose queue the request waited. The payload may name another tenant."""
    weight: float = 1.0
    """The tenant's weight at the time of the claim."""
    is_suspect: bool = False
    """Whether the request must run alone, because workers crashed while they held this request."""
    num_logged: int = 0
    """Number of tokens in the log, read from the id of the log's last entry. Another program may
    have written this entry."""
    received_at: float = field(default_factory=time.monotonic, compare=False)
    """Arrival time of the server's reply, in seconds of `time.monotonic()`. A slow reply gets the
    time at which the quickest recent reply would have arrived."""

    @property
    def order(self) -> tuple[float, str]:
        """Sort key, lowest first: `turn` if the queue has tenants, otherwise score and id."""
        return self.turn or (self.score, self.request_id)

    def server_ms(self, at: float) -> int:
        """Returns the server's Unix milliseconds at `at`, in seconds of `time.monotonic()`."""
        return self.claimed_at_ms + round((at - self.received_at) * 1000)

    def as_held(self) -> Held:
        """Returns the id and the fence, which a call needs to renew or return the lease."""
        return Held(self.request_id, self.fence)


class Claims(list[Claim]):
    """The requests of one claim, in queue order. `num_pending` more requests still wait."""

    num_pending = 0
    next_skip = 0
    """Number of requests that the next claim skips: this worker can never take them."""


@dataclass(slots=True)
class Held:
    """The id and fence of a held request. `prompt_tokens` is set in the call that reports it."""

    request_id: str
    fence: str
    prompt_tokens: int | None = None
