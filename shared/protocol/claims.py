"""Arguments and result of a claim: a worker's free room, and the requests that the worker gets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.output_style import OutputStyle

AFFINITY_RESULTS = ("held", "missed", "left")
"""`held`: in the last two minutes, the worker claimed the request's session or, if no worker did,
its longest claimed beginning; `missed`: only other workers did; `left`: workers first left the
request to others. Equal to the words of the script `claim`."""


class Holding(NamedTuple):
    """Preemptible sequences of one tenant and one priority at a worker: their number and KV tokens.
    Both are 0 for a tenant that has no preemptible sequence."""

    priority: int
    num_running: int
    tokens: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Room:
    """The requests that a worker can still take: at most `max_count` requests, which together need
    at most `token_budget` KV tokens. The other fields:

    - `capacity`: the most KV tokens that one request may take.
    - `preemptible`: priority and KV tokens of each running sequence that a more urgent request may
      preempt.
    - `num_held`: number of requests that the worker holds. A request suspected of earlier crashes
      goes only to a worker that holds no other request.
    - `num_sharing`: number of workers that share the waiting requests. An equal share is the number
      of waiting and held requests divided by `num_sharing`. A claim fills this worker up to an
      equal share. A worker that already holds an equal share still gets up to a quarter of (waiting
      requests / `num_sharing`).
    - `held`: the preemptible sequences of each tenant at this worker. If another tenant exceeds a
      fair share, a tenant without a sequence here may start one even at a full worker.
    - `refused`: names of request fields that the worker's engine cannot serve.
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
    """Marks with which the model writes tool calls and reasoning; None if there is no model."""


@dataclass(frozen=True, slots=True)
class ClaimContext:
    """Facts about this worker's earlier claims. They show the server whether a reply was lost.

    `session` is a random id of the worker's queue object; if empty, the server notices no lost
    reply. `answered` is the nonce of the last claim whose reply had requests. `number` is the
    number of this claim in the session, from 1. `skip` is the number of waiting requests to pass
    over. See `promptq.shared.queue.claim_history`.
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
    """Number of tokens that the request is expected to have in the KV cache."""
    events: list[TokenEvent] = field(default_factory=list)
    """The events that earlier attempts have published."""
    is_spoilt: bool = False
    """Whether the request's log has an entry that is no event, so that no attempt can continue."""
    turn: tuple[float, str] | None = None
    """Sort key for the requests of all tenants; None without tenants. The first part is the lowest
    score of all waiting requests. The second part is the time of the claim, then the request's
    place in the claim's reply."""
    tenant: str = ""
    """Tenant in whose queue the request waited. The payload may name another tenant."""
    weight: float = 1.0
    """The tenant's weight at the time of the claim."""
    is_suspect: bool = False
    """Whether the request must run alone, because workers crashed while they held this request."""
    is_foreign: bool = False
    """Whether an overflow worker with another model or engine has claimed this request, perhaps in
    an earlier attempt."""
    affinity: str = ""
    """The outcome of affinity for the request: one or two words of `AFFINITY_RESULTS`."""
    num_logged: int = 0
    """Number of output tokens in the request's log, according to the id of the last entry."""
    received_at: float = field(default_factory=time.monotonic, compare=False)
    """Time of the claim's reply, in seconds of `time.monotonic()`. If the reply was slower than the
    quickest recent reply, the difference is subtracted."""

    @property
    def order(self) -> tuple[float, str]:
        """Sort key, lowest first: `turn` if the queue has tenants, otherwise score and id."""
        return self.turn or (self.score, self.request_id)

    def server_ms(self, at: float) -> int:
        """Converts a time of `time.monotonic()`, in seconds, to Unix milliseconds of the server."""
        return self.claimed_at_ms + round((at - self.received_at) * 1000)

    def as_held(self) -> Held:
        """Returns the id and the fence. The worker needs both to renew or return the lease."""
        return Held(self.request_id, self.fence)


class Claims(list[Claim]):
    """The requests of one claim, in queue order. `num_pending` more requests still wait."""

    num_pending = 0
    next_skip = 0
    """Number of waiting requests that the next claim skips: this worker cannot serve them."""


@dataclass(slots=True)
class Held:
    """The id and fence of a request that a worker holds. `prompt_tokens` is the length of the
    prompt, set only in the call that reports the length to the server."""

    request_id: str
    fence: str
    prompt_tokens: int | None = None
