"""A claim: what a worker has room for, and what it gets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.tool_call_style import ToolCallStyle


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker has room for.

    `capacity` is the KV in tokens that one request may take at most, `preemptible` the (priority,
    tokens) of running sequences, which a more urgent request may displace. `num_held` is how many
    requests it holds already: a suspect of earlier crashes goes only to a worker that holds none.
    """

    max_count: int
    token_budget: int
    capacity: int = 2**53
    preemptible: Sequence[tuple[int, int]] = ()
    num_held: int = 0


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model that workers of a queue must agree on; empty: any."""

    name: str = ""
    fingerprint: str = ""
    tool_call_style: ToolCallStyle | None = None
    """How it writes the call of a tool; None where there is no model."""


@dataclass(frozen=True, slots=True)
class ClaimContext:
    """Which calls went before, so that the server notices a lost reply.

    See `promptq.shared.queue.claim_history`. Without a session no lost reply is noticed.
    """

    session: str = ""
    answered: str = ""
    skip: int = 0
    number: int = 0


@dataclass(slots=True)
class Claim:
    """A request as a worker got it; the fence proves this attempt in every later call."""

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
    """What earlier attempts emitted."""
    is_spoilt: bool = False
    """Whether the log holds something that is no event, so that nobody can go on behind it."""
    turn: tuple[float, str] | None = None
    """Where tenants share: the score whose turn it was, then the time and order of the hand-out."""
    tenant: str = ""
    """Whose queue it waited in, whatever its payload says; empty: no tenant's."""
    is_suspect: bool = False
    """Whether it was aboard at crashes, so that it is to run with nothing beside it."""
    num_logged: int = 0
    """Tokens that the log holds by the id of its last entry, be it an event or not."""
    received_at: float = field(default_factory=time.monotonic, compare=False)
    """When the server's reply came; `time.monotonic()` in seconds."""

    @property
    def order(self) -> tuple[float, str]:
        """Place in the queue, or in what tenants share: lowest first."""
        return self.turn or (self.score, self.request_id)

    def server_ms(self, at: float) -> int:
        """Unix milliseconds of the server at `at`, a `time.monotonic()` in seconds."""
        return self.claimed_at_ms + round((at - self.received_at) * 1000)

    def as_held(self) -> Held:
        """What renews its lease or gives it back."""
        return Held(self.request_id, self.fence)


class Claims(list[Claim]):
    """What one claim gave, in queue order; `num_pending` requests still wait."""

    num_pending = 0
    next_skip = 0
    """What the next call passes as `skip`, to get behind what this worker can never take."""


@dataclass(slots=True)
class Held:
    """A request that a worker holds. `prompt_tokens` is told once, when it becomes known."""

    request_id: str
    fence: str
    prompt_tokens: int | None = None
