"""The worlds to explore: their requests, and the moves that may happen to them.

A state is all data on the server. Workers are not modelled: a move may use any claim that was ever
returned, at any time, from any position and any number of times. This model covers:

- a crash: the claim is never used again, and the lease expires
- a freeze: the claim is used after other workers have continued (a zombie)
- a lost reply: the same call (publish, release, enqueue, cancel, reap) is sent again
- a lost reply to a claim: no worker knows the claim, until its session reports the last reply that
  it got
- calls that arrive twice, in another order, or late

Two real workers can never use the same claim at the same time. In a world, this may happen, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property

from pydantic import ValidationError

from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.keys import Keys

NOW_MS = 1_790_000_000_000
"""The time of the explored server's clock, which stands still. Time passes by moves that set the
end of a lease or delay, or a deadline, to the past."""

DEAD_LETTER_MS = 14 * 24 * 3_600_000
LONG_DEAD = NOW_MS - DEAD_LETTER_MS
"""Dead letters from this time or before have been kept long enough."""

AMPLE = 10**6
"""A token budget for all requests together."""

KEYS = Keys("states")
WORKERS = ("worker-a", "worker-b", "worker-c")


STRAY = frozenset({"half", "drop", "lose"})
"""Moves by which a plain client leaves orphaned keys behind."""


@dataclass(frozen=True)
class Spec:
    """One request of a producer. Token number `i` of its output is `first_token + i`."""

    request_id: str
    first_token: int
    num_tokens: int = 3
    priority: int = 0
    delay_ms: int = 0
    deadline_ms: int = 0
    tenant: str | None = None
    plain: bool = False
    """Whether the protocol's three plain commands enqueue it, instead of the script."""
    idempotency_key: str | None = None
    requeue_of: str = ""
    """The dead letter from which this request is made, instead of being enqueued."""
    arrived_ms: int = NOW_MS

    def token(self, index: int) -> int:
        return self.first_token + index


@dataclass(frozen=True)
class World:
    """Requests, and the moves that may happen to them.

    `losses` is the number of times that a request may lose its worker, by an expired lease or a
    release. After that, workers never lose the request. This limit bounds the number of states.
    `moves` has names of groups of the module `moves`.
    """

    specs: tuple[Spec, ...]
    moves: frozenset[str]
    losses: int = 1
    max_crashes: int = 3
    num_workers: int = 2
    all_positions: bool = False
    """Whether stale rows may have every position, not only those around the end of the log."""
    budgets: tuple[int, ...] = (AMPLE,)
    """The token budgets that a claiming worker may have."""
    priorities: tuple[int, ...] = ()
    """Priorities that somebody may give to a waiting request."""
    config: tuple[str, ...] = ()
    """The queue's settings: field, value, ..."""

    @property
    def start(self) -> bytes:
        """The state before any move."""
        config = [[KEYS.config, "hash", list(self.config), False]] if self.config else []
        return json.dumps(config, separators=(",", ":")).encode()

    @cached_property
    def by_id(self) -> dict[str, Spec]:
        return {spec.request_id: spec for spec in self.specs}


LogEntry = tuple[str, str]
"""The stream id and the JSON of an event."""


class View:
    """A state of the server: the queue's keys by their meaning, and the server's time in
    milliseconds."""

    def __init__(self, snapshot: bytes, queue: Keys = KEYS, now_ms: int = NOW_MS) -> None:
        self.snapshot = snapshot
        self.queue = queue
        self.now_ms = now_ms
        self.keys: set[str] = set()
        self.expiring: set[str] = set()
        self.hashes: dict[str, dict[str, str]] = {}
        self.logs: dict[str, tuple[LogEntry, ...]] = {}
        self.is_paused = False
        self.claimed: dict[str, tuple[str, tuple[str, ...]]] = {}
        """By session: nonce and ids of the last claim that returned requests."""
        self.claim_numbers: dict[str, int] = {}
        """By session: the number of that claim."""
        self.backlog: dict[str, int] = {}
        self.kept_for_a_time: list[str] = []
        """Keys of neither a request nor its log that expire."""
        self.pending: dict[str, float] = {}
        self.places: dict[str, int] = {}
        """How many sets of waiting ids hold the id: `pending`, those of tenants, `delayed`."""
        sets: dict[str, dict[str, float]] = {}
        for key, kind, values, has_expiry in json.loads(snapshot):
            self.keys.add(key)
            if has_expiry:
                self.expiring.add(key)
            name = key.removeprefix(queue.prefix)
            group, _, rest = name.partition(":")
            if has_expiry and group not in ("request", "tokens"):
                self.kept_for_a_time.append(key)
            if kind == "hash" and group == "request":
                self.hashes[rest] = dict(zip(values[::2], values[1::2], strict=True))
            elif name == "config":
                settings = dict(zip(values[::2], values[1::2], strict=True))
                self.is_paused = settings.get("paused") == "1"
            elif group == "claimed":
                nonce, number, *ids = values[0].split()
                self.claimed[rest] = (nonce, tuple(ids))
                self.claim_numbers[rest] = int(number)
            elif name == "backlog":
                self.backlog = dict(zip(values[::2], map(int, values[1::2]), strict=True))
            elif kind == "stream" and group == "tokens":
                self.logs[rest] = tuple((entry, fields[1]) for entry, fields in values)
            elif kind == "zset":
                scores = map(float, values[1::2])
                members = dict(zip(values[::2], scores, strict=True))
                sets[name] = members
                if group == "pending":
                    self.pending.update(members)
                if group in ("pending", "delayed"):
                    for request_id in members:
                        self.places[request_id] = self.places.get(request_id, 0) + 1
        self._states = {
            request_id: fields.get("state", "waiting" if "payload" in fields else "")
            for request_id, fields in self.hashes.items()
        }
        self.delayed = sets.get("delayed", {})
        self.leases = sets.get("leases", {})
        self.deadlines = sets.get("deadlines", {})
        self.dead = sets.get("dead", {})
        self.orphans = sets.get("orphans", {})
        self.running = {
            name.removeprefix("tenants:running").removeprefix(":"): {*members}
            for name, members in sets.items()
            if name.startswith("tenants:running")
        }
        """By tenant: the number that its limit of running requests counts."""

    def is_accepted(self, request_id: str) -> bool:
        return "payload" in self.hashes.get(request_id, {})

    def fields(self, request_id: str) -> dict[str, str]:
        return self.hashes.get(request_id, {})

    def state(self, request_id: str) -> str:
        """The state by its name in docs/protocol.md; empty if there is no request."""
        return self._states.get(request_id, "")

    def is_final(self, request_id: str) -> bool:
        return self.state(request_id) in FINAL

    def attempt(self, request_id: str) -> int:
        return int(self.fields(request_id).get("attempt", "0"))

    def log(self, request_id: str) -> tuple[LogEntry, ...]:
        return self.logs.get(request_id, ())

    def is_spoilt(self, request_id: str) -> bool:
        """Whether the request's log has entries that no worker writes."""
        return any(not _is_event(event) for _, event in self.log(request_id))

    def count(self, request_id: str) -> int:
        """Returns the number of tokens in the request's log."""
        log = self.log(request_id)
        return int(log[-1][0].split("-")[0]) if log else 0

    def held_by_last_claim(self, session: str) -> list[str]:
        """Returns the requests of the session's last claim that no later claim has got."""
        nonce, given = self.claimed.get(session, ("", ()))
        return [
            request_id
            for request_id in given
            if self.state(request_id) == "active"
            and self.fields(request_id)["fence"].partition("-")[2] == nonce
        ]

    def is_orphan(self, request_id: str) -> bool:
        """Whether the id has a key that never expires, although nobody holds the request and no set
        has the id."""
        keys = {self.queue.request(request_id), self.queue.tokens(request_id)}
        is_held = request_id in self.leases or request_id in self.places
        return bool(keys & self.keys - self.expiring) and not (is_held or self.is_final(request_id))

    def priority(self, request_id: str) -> int:
        """Returns the priority in the request's payload."""
        return _priority_in(self.fields(request_id).get("payload", "{}"))

    def is_past_deadline(self, request_id: str) -> bool:
        return self.deadlines.get(request_id, self.now_ms + 1) <= self.now_ms

    def is_dead_for_long(self, request_id: str) -> bool:
        """Whether the request is a dead letter that was kept for its full time."""
        return self.dead.get(request_id, self.now_ms) <= self.now_ms - DEAD_LETTER_MS


@cache
def _is_event(text: str) -> bool:
    try:
        TokenEvent.model_validate_json(text)
    except ValidationError:
        return False
    return True


@cache
def _priority_in(payload: str) -> int:
    return int(json.loads(payload).get("priority", 0))


FINAL = frozenset({"completed", "failed", "cancelled", "expired", "dead"})
