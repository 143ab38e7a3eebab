"""Names of keys and channels for Python code. The Lua scripts use more keys (../lua/lib/keys.lua).

The queue's name is in braces, a Redis Cluster hash tag, so all keys of a queue are on one shard.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from promptq.shared.errors import ConfigurationError, InvalidRequestError

NAME = r"^[A-Za-z0-9_.\-]{1,64}$"
"""Pattern of the names that queues, tenants and API keys may have."""
NAME_IN_WORDS = "1 to 64 letters, digits, '_', '.' or '-'"
"""Description of `NAME` for messages."""

PREFIX = "promptq:"
"""The beginning of every key that promptq writes to Redis."""
QUEUES = f"{PREFIX}queues"
"""Key of the set of the queues that workers have served. The key belongs to no queue."""
ALIASES = f"{PREFIX}aliases"
"""Key of the hash that maps aliases, such as `gpt-4o`, to names of models, for all queues."""

_NAME = re.compile(NAME)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")

ALL_QUEUES = "*"
"""Name that stands for all queues."""


def is_request_id(text: str) -> bool:
    """Returns whether a text is 1 to 200 printable ASCII characters without spaces."""
    return _REQUEST_ID.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Returns whether a queue, a tenant or an API key may have this name."""
    return _NAME.fullmatch(text) is not None


def check_request_id(request_id: str) -> str:
    """Returns `request_id` unchanged. Raises InvalidRequestError unless the id is 1 to 200
    printable ASCII characters without spaces."""
    if not is_request_id(request_id):
        raise InvalidRequestError(
            f"id: {request_id[:80]!r} is not 1 to 200 printable ASCII characters without spaces",
            field="id",
        )
    return request_id


class _Name:
    """Descriptor for the name of a key: the queue's prefix, then `name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, keys: Keys, kind: type[Keys]) -> str:
        return keys.prefix + self._name


class _Channel(_Name):
    def __get__(self, keys: Keys, kind: type[Keys]) -> str:
        return keys.channels + self._name


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of the keys and channels of one queue.

    Redis shares channels between all databases of a server. So the names of channels contain the
    number `database`, except for database 0.

    Raises ConfigurationError unless the queue's name is 1 to 64 letters, digits and `_.-`.
    """

    queue: str = "default"
    database: int = 0

    pending = _Name("pending")
    control = _Channel("control")
    drain = _Channel("drain")
    """A channel whose messages make workers finish running requests and exit."""
    leases = _Name("leases")
    deadlines = _Name("deadlines")
    delayed = _Name("delayed")
    dead = _Name("dead")
    config = _Name("config")
    model = _Name("model")
    """Hash with the name, fingerprint and output style of the queue's model."""
    workers = _Name("workers")
    overflow_workers = _Name("workers:overflow")
    reaper = _Name("workers:reaper")
    """Lease of the worker that ends expired leases and deletes orphans."""
    tenants_waiting = _Name("tenants:waiting")
    backlog = _Name("backlog")
    """Hash with the numbers of waiting requests and their tokens, for the limits of `enqueue`."""
    api_keys = _Name("api_keys")
    api_keys_used = _Name("api_keys:used")
    """Hash with the time at which each API key was last used."""
    webhooks = _Name("webhooks")
    """Sorted set of requests that have ended and have a webhook, by the time (ms) of their end."""
    webhooks_waiting = _Name("webhooks:waiting")
    """Hash of waiting webhooks. Maps request ids to the number of attempts so far and the time of
    the next attempt."""
    webhooks_dead = _Name("webhooks:dead")
    """The last few thousand webhooks that were given up."""
    jobs_leader = _Name("jobs:leader")
    """Lease of the leader: the `promptq jobs` process that hands out background work."""
    upkeep = _Name("upkeep")
    """Hash with the time of the last reap (a search for dead workers and passed deadlines), and the
    time at which reaps began to run without interruption."""
    statistics = _Name("statistics")
    """Samples of the queue's statistics, one for each 5 s of the last hour."""
    statistics_open = _Name("statistics:open")
    """Hash with the sample of the current 5 s."""
    statistics_minutes = _Name("statistics:minutes")
    """A sample for each minute, computed from the samples in the stream `statistics`."""
    unfinished_batches = _Name("batches:unfinished")
    unfinished_responses = _Name("responses:unfinished")
    """Sorted set of stored responses without a result, by the time (ms) of the last check."""

    def __post_init__(self) -> None:
        if not is_name(self.queue):
            raise ConfigurationError(f"queue: {self.queue[:80]!r} is not {NAME_IN_WORDS}")

    @property
    def prefix(self) -> str:
        """The beginning of every key of the queue. The scripts derive all other keys from it."""
        return f"{PREFIX}{{{self.queue}}}:"

    @property
    def channels(self) -> str:
        """The beginning of every channel of the queue."""
        return f"{self.prefix}{self.database}:" if self.database else self.prefix

    def pending_of(self, tenant: str) -> str:
        """Returns the key of a tenant's waiting requests. '' is the tenant without a name. Raises
        InvalidRequestError unless the name is 1 to 64 letters, digits and `_.-`."""
        if tenant and not is_name(tenant):
            raise InvalidRequestError(
                f"tenant: {tenant[:80]!r} is not {NAME_IN_WORDS}", field="tenant"
            )
        return f"{self.pending}:{tenant}" if tenant else self.pending

    def batches_of(self, tenant: str) -> str:
        """Returns the key of a tenant's batches by creation time; '' is the unnamed tenant."""
        return f"{self.prefix}batches:of:{tenant}"

    def batch(self, batch_id: str) -> str:
        return f"{self.prefix}batch:{batch_id}"

    def batch_runner(self, batch_id: str) -> str:
        """Returns the key of a batch's lease. The process that runs the batch holds this lease."""
        return f"{self.prefix}batch:{batch_id}:runner"

    def response(self, response_id: str) -> str:
        """Returns the key of a stored response of the HTTP API."""
        return f"{self.prefix}response:{response_id}"

    def idempotency(self, key: str) -> str:
        """Returns the Redis key that stores the id of the request with this idempotency key."""
        return f"{self.prefix}idempotency:{key}"

    def request(self, request_id: str) -> str:
        return f"{self.prefix}request:{request_id}"

    def picture(self, name: str) -> str:
        """Returns the key of a stored picture, a hash whose field `url` has the data URL."""
        return f"{self.prefix}picture:{name}"

    def tokens(self, request_id: str) -> str:
        return f"{self.prefix}tokens:{request_id}"

    def events(self, request_id: str) -> str:
        return f"{self.channels}events:{request_id}"

    def worker(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}"

    def slots(self, worker_id: str) -> str:
        """Returns the key of a worker's last report about the sequences in its batch."""
        return f"{self.prefix}slots:{worker_id}"
