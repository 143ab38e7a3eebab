"""The input and result of a claim: a worker's room, and the requests that it gets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.output_style import OutputStyle


class Holding(NamedTuple):
    """The preemptible sequences of one priority that a tenant runs at a worker: their number and
    their KV tokens. Both are 0 for a tenant whose requests there are not preemptible."""

    priority: int
    num_running: int
    tokens: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Room:
    """A worker's room for requests.

    - `capacity`: the most KV tokens that one request may take.
    - `preemptible`: the (priority, tokens) of running sequences that a more urgent request may
      preempt.
    - `num_held`: the number of requests that the worker holds. A request that is suspected of
      earlier crashes goes only to a worker that holds no other.
    - `num_sharing`: the number of workers that share the waiting requests. A claim takes at most
      the rest of one worker's share, or a small part of the waiting requests if that is more.
    - `held`: the holdings of tenants at this worker. If another tenant has more than its share, a
      tenant without holdings gets a request even without room.
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
    """The model that all workers of a queue must have. Empty fields stand for any model."""

    name: str = ""
    fingerprint: str = ""
    output_style: OutputStyle | None = None
    """The model's style for tool calls and reasoning; None if there is no model."""


@dataclass(frozen=True, slots=True)
class ClaimContext:
    """Facts about earlier calls. The server compares them with its own to notice a lost reply.

    See `promptq.shared.queue.claim_history`. Without a session, the server notices no lost reply.
    """

    session: str = ""
    answered: str = ""
    skip: int = 0
    number: int = 0


@dataclass(slots=True)
class Claim:
    """A request that a worker claimed. In each later call, the fence proves this attempt."""

    request_id: str
    payload: bytes
    fence: str
    attempt: int
    score: float
    seed: int
    enqueued_at_ms: int
    claimed_at_ms: int
    prompt_tokens: int | None
    """Exact length of the prompt if an earlier attempt tokenised it."""
    cost: int
    """Expected KV need in tokens, as counted against the budget."""
    events: list[TokenEvent] = field(default_factory=list)
    """The events of earlier attempts."""
    is_spoilt: bool = False
    """Whether the log has an entry that is not an event, so that no attempt can continue it."""
    turn: tuple[float, str] | None = None
    """The place among the requests of tenants that share: the lowest waiting score at the claim,
    then the claim's time and order. None if no tenants share."""
    tenant: str = ""
    """The tenant in whose queue the request waited, whatever its payload says; empty: no tenant."""
    weight: float = 1.0
    """The tenant's weight when it was claimed."""
    is_suspect: bool = False
    """Whether workers crashed while they held the request, which therefore must run alone."""
    num_logged: int = 0
    """Number of tokens in the log. The id of the log's last entry has this number, even if the
    entry is not an event."""
    received_at: float = field(default_factory=time.monotonic, compare=False)
    """Arrival time of the server's reply, a `time.monotonic()` in seconds. The delay of the reply
    is corrected to that of the quickest recent reply."""

    @property
    def order(self) -> tuple[float, str]:
        """Sort key: the place in the queue, or in the order of tenants that share. Lowest first."""
        return self.turn or (self.score, self.request_id)

    def server_ms(self, at: float) -> int:
        """Unix milliseconds of the server at `at`, a `time.monotonic()` in seconds."""
        return self.claimed_at_ms + round((at - self.received_at) * 1000)

    def as_held(self) -> Held:
        """Returns the id and the fence, with which a call renews or returns the lease."""
        return Held(self.request_id, self.fence)


class Claims(list[Claim]):
    """The requests of one claim, in queue order; `num_pending` more requests wait."""

    num_pending = 0
    next_skip = 0
    """`skip` for the next claim, which passes over requests that this worker can never take."""


@dataclass(slots=True)
class Held:
    """A request that a worker holds. The worker sends `prompt_tokens` once."""

    request_id: str
    fence: str
    prompt_tokens: int | None = None
