"""Users for the server's access control list (ACL): a role for each kind of process of one queue.

Commands and the names of keys and channels limit a role. A role cannot be limited to some scripts,
because the server runs a script with the rights of the caller. So a role that enqueues by a script
may also write the same keys by hand. docs/security.md describes the consequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from promptq.shared.protocol.keys import ALIASES, ALL_QUEUES, QUEUES, Keys

FAMILIES: dict[str, tuple[str, ...]] = {
    "waiting": ("pending", "pending:*", "tenants", "tenants:*", "backlog", "deadlines", "delayed"),
    "requests": ("request:*", "idempotency:*"),
    "logs": ("tokens:*",),
    "leases": ("leases", "webhooks", "dead"),
    "outputs": ("outputs",),
    "claims": ("claimed:*", "alone", "orphans"),
    "workers": ("workers", "worker:*", "slots:*"),
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
"""The queue's keys by their subject, as patterns that follow the queue's prefix."""

_READS_DIRECTORY = (f"%R~{QUEUES}", f"%R~{ALIASES}")
"""Keys that all queues of the server share: their names, and aliases of models."""

_CONNECT = (
    "+@connection -@dangerous -@admin -client|tracking -client|caching +info +time +cluster|slots"
)
"""Commands with which every client connects. Redis 7.0 cannot permit `client|setinfo` by name, so
the whole category is permitted. Excluded are commands that disturb others, and CLIENT TRACKING,
which would report the keys of all clients."""

_READ = (
    "exists get hexists hget hgetall hlen hmget hstrlen hvals lrange pttl smembers srandmember type"
    " xrange xread xrevrange zcard zmscore zrange zscore"
)
_WRITE = (
    "del hdel hincrby hset hsetnx lpush ltrim persist pexpire sadd set srem xadd zadd zrem"
    " zremrangebyscore"
)
_LISTEN = "ssubscribe subscribe sunsubscribe unsubscribe"
_SCRIPTS = "evalsha publish script|load spublish"
_DATABASES = ("", "[1-9]*:")
"""Patterns for the text between a channel's prefix and its name: nothing in database 0, the number
in others. No channel of database 0 matches the second pattern."""

_LOOK_THROUGH = "dbsize scan"
"""Commands that read all keys of the database, also those of other queues."""

_RQ_COMMANDS = "blmove expire hincrbyfloat llen lmove lrem rpush scard zrangebyscore"

_RQ_KEYS = (
    *(f"~rq:{kind}:promptq-*" for kind in ("queue", "workers", "worker", "job", "job:")),
    *(f"~rq:{kind}:promptq-*" for kind in ("execution", "executions", "results", "finished")),
    *(f"~rq:{kind}:promptq-*" for kind in ("failed", "wip", "scheduled", "clean_registries")),
    *("~rq:queues", "~rq:workers", "%R~rq:suspended", "~rq:job:msg_*"),  # the last for jobs of 0.2
)
"""The names of promptq's queues, jobs and workers in RQ, and RQ's lists of all programs."""


@dataclass(frozen=True, slots=True)
class Role:
    """The rights of a kind of process: families of keys, channels, commands."""

    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    commands: str = ""
    others: tuple[str, ...] = ()
    """Rules for keys and channels that are not the queue's."""

    def rules(self, queue: str) -> list[str]:
        """Returns the rules in the form of the server's ACL."""
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
        commands=f"{_READ} {_WRITE} {_SCRIPTS} {_LISTEN} multi exec discard watch unwatch",
        others=_READS_DIRECTORY,
    ),
    "subscriber": Role(
        reads=("logs", "config"),
        channels=("events:*",),
        commands=f"hget hmget xrange xread {_LISTEN}",
    ),
    "worker": Role(
        writes=(
            *_ENQUEUEING,
            *("outputs", "claims", "workers", "statistics", "model", "rates"),
        ),
        reads=("config",),
        channels=("control", "drain", "events:*"),
        commands=f"{_READ} {_WRITE} {_SCRIPTS} {_LISTEN} scan",
        others=(f"~{QUEUES}",),
    ),
    "gateway": Role(
        writes=(*_ENQUEUEING, "config", "used", "rates", "batches", "responses"),
        reads=("outputs", "workers", "statistics", "model", "api_keys"),
        channels=("control", "drain", "events:*"),
        commands=f"{_READ} {_WRITE} {_SCRIPTS} {_LISTEN} {_LOOK_THROUGH}"
        " multi exec discard watch unwatch zintercard",
        others=_READS_DIRECTORY,
    ),
    "jobs": Role(
        writes=(*_ENQUEUEING, "rates", "batches", "upkeep", "statistics"),
        reads=("outputs", "workers", "model", "config"),
        channels=("control", "events:*"),
        commands=f"{_READ} {_WRITE} {_SCRIPTS} {_RQ_COMMANDS} multi exec discard watch unwatch",
        others=(*_RQ_KEYS, *_READS_DIRECTORY),
    ),
    "operator": Role(
        writes=tuple(FAMILIES),
        channels=("control", "drain", "events:*"),
        commands=f"{_READ} {_WRITE} {_SCRIPTS} {_LISTEN} {_LOOK_THROUGH}"
        " multi exec discard watch unwatch",
        others=(f"~{QUEUES}", f"~{ALIASES}"),
    ),
}
"""Roles by name. An `operator` creates API keys, pauses the queue and sets weights and limits."""


def user_rules(role: str, queue: str, password: str) -> list[str]:
    """The rules of a role's user, as `ACL SETUSER NAME` and an ACL file take them."""
    first, *rest = ROLES[role].rules(queue)
    return [first, f">{password}", *rest]


def user_name(role: str, queue: str) -> str:
    """The user of a queue's role. Users of the queue `default` and of all queues have no suffix."""
    return role if queue in ("default", ALL_QUEUES) else f"{role}-{queue}"


def acl_file(queue: str, passwords: Mapping[str, str]) -> str:
    """Lines of a server's `aclfile`: the users of a queue, by the passwords of their roles.

    Raises ConfigurationError if no queue may have this name.
    """
    if queue != ALL_QUEUES:
        Keys(queue)
    lines = [
        " ".join(["user", user_name(role, queue), *user_rules(role, queue, passwords[role])])
        for role in ROLES
    ]
    return "".join(f"{line}\n" for line in lines)
