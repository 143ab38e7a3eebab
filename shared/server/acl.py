"""Users for the server's access control list (ACL): one role for each kind of process of a queue.

A role limits commands, keys and channels. A role does not limit scripts: the server runs a script
with the rights of its caller. So a role that may enqueue by a script may also write the same keys
without the script (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from promptq.shared.protocol.keys import ALIASES, ALL_QUEUES, QUEUES, Keys

FAMILIES: dict[str, tuple[str, ...]] = {
    "waiting": (
        *("pending", "pending:*", "woken", "tenants", "tenants:*"),
        *("backlog", "deadlines", "delayed"),
    ),
    "requests": ("request:*", "idempotency:*", "picture:*"),
    "logs": ("tokens:*",),
    "leases": ("leases", "webhooks", "dead"),
    "outputs": ("outputs",),
    "claims": ("claimed:*", "holder:*", "alone", "orphans"),
    "workers": ("workers", "workers:*", "worker:*", "slots:*"),
    "statistics": ("statistics", "statistics:*"),
    "model": ("model",),
    "config": ("config",),
    "api_keys": ("api_keys",),
    "used": ("api_keys:*",),
    "rates": ("rate:*",),
    "batches": ("batch:*", "batches:*"),
    "responses": ("response:*", "responses:*"),
    "upkeep": ("jobs:*", "upkeep", "webhooks:*"),
}
"""The patterns of the keys in each family of keys. A pattern follows the queue's prefix."""

_READS_DIRECTORY = (f"%R~{QUEUES}", f"%R~{ALIASES}")
"""Rules to read the keys that all queues share: the queues' names, and the models' aliases."""

_CONNECT = (
    "+@connection -@dangerous -@admin -client|tracking -client|caching +info +time +cluster|slots"
)
"""Rules for the commands that every client needs to connect. The rules permit a whole category,
because Redis 7.0 cannot permit `client|setinfo` by name. They exclude commands that disturb others,
and CLIENT TRACKING, which would report the keys of all clients."""

_COMMON = (
    "exists get hexists hget hgetall hlen hmget hstrlen hvals lrange pttl scard smembers"
    " srandmember type xrange xread xrevrange zcard zcount zmscore zrange zrank zscore del hdel"
    " hincrby hset hsetnx lpush ltrim mget persist pexpire sadd set srem xadd zadd zrem"
    " zremrangebyscore"
    " evalsha publish script|load spublish"
)
"""Commands of all roles except `subscriber`: to read, to write, and to run scripts."""
_LISTEN = "ssubscribe subscribe sunsubscribe unsubscribe"
_TRANSACTIONS = "multi exec discard watch unwatch"
_DATABASES = ("", "[1-9]*:")
"""Patterns for the text between a channel's prefix and its name: nothing for database 0, the number
and a colon for other databases. A channel of database 0 never matches the second pattern."""

_LOOK_THROUGH = "dbsize scan"
"""Commands that read the names of all keys of the database, including those of other queues."""

_RQ_COMMANDS = "blmove expire hincrbyfloat llen lmove lrem rpush zrangebyscore"

_RQ_KEYS = (
    *(f"~rq:{kind}:promptq-*" for kind in ("queue", "workers", "worker", "job", "job:")),
    *(f"~rq:{kind}:promptq-*" for kind in ("execution", "executions", "results", "finished")),
    *(f"~rq:{kind}:promptq-*" for kind in ("failed", "wip", "scheduled", "clean_registries")),
    *("~rq:queues", "~rq:workers", "%R~rq:suspended", "~rq:job:msg_*"),  # the last for jobs of 0.2
)
"""Patterns for promptq's queues, jobs and workers in RQ, and for RQ lists that programs share."""


@dataclass(frozen=True, slots=True)
class Role:
    """Rights of one kind of process: key families that it writes or reads, channels, commands."""

    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    commands: str = ""
    others: tuple[str, ...] = ()
    """Rules for keys that do not belong to the queue."""

    def rules(self, queue: str) -> list[str]:
        """Returns the rules of this role in the syntax of the server's ACL."""
        prefix = Keys("all").prefix.replace("all", queue)
        keys = [f"~{prefix}{key}" for family in self.writes for key in FAMILIES[family]]
        keys += [f"%R~{prefix}{key}" for family in self.reads for key in FAMILIES[family]]
        channels = [f"&{prefix}{at}{channel}" for channel in self.channels for at in _DATABASES]
        commands = [f"+{command}" for command in sorted(set(self.commands.split()))]
        rules = ["reset", "on", *keys, *channels, *self.others, "-@all"]
        return [*rules, *_CONNECT.split(), *commands]  # a category overrides the rules before it


_ENQUEUEING = ("waiting", "requests", "logs", "leases")

ROLES: dict[str, Role] = {
    "producer": Role(
        writes=_ENQUEUEING,
        reads=("outputs", "workers", "statistics", "model", "config"),
        channels=("control", "events:*"),
        commands=f"{_COMMON} {_LISTEN} {_TRANSACTIONS}",
        others=_READS_DIRECTORY,
    ),
    "subscriber": Role(
        reads=("logs", "config"),
        channels=("events:*",),
        commands=f"hget hmget xrange xread {_LISTEN}",
    ),
    "worker": Role(
        writes=(*_ENQUEUEING, *("outputs", "claims", "workers", "statistics", "model", "rates")),
        reads=("config",),
        channels=("control", "drain", "events:*"),
        commands=f"{_COMMON} {_LISTEN} hrandfield scan",
        others=(f"~{QUEUES}",),
    ),
    "gateway": Role(
        writes=(*_ENQUEUEING, "config", "used", "rates", "batches", "responses"),
        reads=("outputs", "workers", "statistics", "model", "api_keys"),
        channels=("control", "drain", "events:*"),
        commands=f"{_COMMON} {_LISTEN} {_LOOK_THROUGH} {_TRANSACTIONS} zintercard",
        others=_READS_DIRECTORY,
    ),
    "jobs": Role(
        writes=(*_ENQUEUEING, "rates", "batches", "upkeep", "statistics"),
        reads=("outputs", "workers", "model", "config"),
        channels=("control", "events:*"),
        commands=f"{_COMMON} {_RQ_COMMANDS} {_TRANSACTIONS}",
        others=(*_RQ_KEYS, *_READS_DIRECTORY),
    ),
    "operator": Role(
        writes=tuple(FAMILIES),
        channels=("control", "drain", "events:*"),
        commands=f"{_COMMON} {_LISTEN} {_LOOK_THROUGH} {_TRANSACTIONS}",
        others=(f"~{QUEUES}", f"~{ALIASES}"),
    ),
}
"""Maps names to roles. An `operator` creates API keys, pauses queues, sets weights and limits."""


def user_rules(role: str, queue: str, password: str) -> list[str]:
    """Returns the rules of a role's user, for `ACL SETUSER NAME` or an ACL file."""
    first, *rest = ROLES[role].rules(queue)
    return [first, f">{password}", *rest]


def user_name(role: str, queue: str) -> str:
    """Returns the name of the Redis user with a role for a queue. The name has no suffix if the
    queue is `default` or stands for all queues."""
    return role if queue in ("default", ALL_QUEUES) else f"{role}-{queue}"


def acl_file(queue: str, passwords: Mapping[str, str]) -> str:
    """Returns the text of a server's `aclfile` for a queue's users. `passwords` maps roles to
    passwords. Raises ConfigurationError if the name of the queue is not valid."""
    if queue != ALL_QUEUES:
        Keys(queue)
    lines = [
        " ".join(["user", user_name(role, queue), *user_rules(role, queue, passwords[role])])
        for role in ROLES
    ]
    return "".join(f"{line}\n" for line in lines)
