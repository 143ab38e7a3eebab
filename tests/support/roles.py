"""The roles of `promptq acl` on the servers that tests start, for all queues.

Tested code connects in its role. The reads and changes of a test itself use the server's default
user, who may do anything. deploy/redis.acl turns that user off.

Some servers have no roles:

- fakeredis, which does not support them
- the servers of `promptq up`, `demo` and `server`, which are for one user of one machine
- servers that a test stops, and servers whose password or users a test sets
- the server of the exploration of states

In a cluster, tests call scripts without a role, because these tests are about slots. The worker and
the client there have roles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio
from redis.commands.core import AsyncScript, Script

from promptq.shared.queue.call import SCRIPT_NAMES, script_text
from promptq.shared.server.acl import ROLES, acl_file, user_rules
from tests.support.paths import ROOT

ACL_FILE = ROOT / "deploy" / "redis.acl"

_ROLE_OF_SCRIPT = {
    "enqueue": "producer",
    "cancel": "producer",
    "requeue": "producer",
    "purge": "producer",
    "list_waiting": "producer",
    "charge_rates": "gateway",
    "place": "producer",
    "priorities": "producer",
    "measure_work": "producer",
    "reprioritise": "producer",
    "has_work": "worker",
    "claim": "worker",
    "publish": "worker",
    "release": "worker",
    "reap": "worker",
    "statistics": "worker",
    "sweep": "worker",
    "heartbeat": "worker",
    "hold_lease": "operator",  # workers and jobs call it, for different keys
    "store_response": "gateway",
}
"""The role that calls each script. Workers call `cancel`, too."""


def as_role(role: str, url: str) -> str:
    """Returns the URL with the role's name and password. An empty role is the default user."""
    parts = urlsplit(url)
    credentials = f"{role}:{password_of(role)}@" if role else ""
    return urlunsplit(parts._replace(netloc=credentials + parts.netloc.rpartition("@")[2]))


def acl_file_for_tests(folder: Path) -> Path:
    """Writes a server's `aclfile` with the roles, in which the default user stays on."""
    copy = folder / "redis.acl"
    copy.write_text(acl_file("*", {role: password_of(role) for role in ROLES}))
    return copy


def bring_in_roles(url: str) -> None:
    """Add the roles' users to a running server. The default user stays, and needs no password."""
    drop_password(url)
    with redis.Redis.from_url(url) as client:
        for role in ROLES:
            rules = user_rules(role, "*", password_of(role))
            client.execute_command("ACL", "SETUSER", role, *rules)


def password_of(role: str) -> str:
    """Returns a user's password in deploy/redis.acl."""
    return f"change-me-{role}"


def drop_password(url: str) -> None:
    """Allow connections as an embedded server's default user, with any password or none."""
    with redis.Redis.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "default", "nopass")


def refusals(url: str) -> list[str]:
    """Returns the commands that the server has refused to any role since `forget_refusals`; see
    `refused`."""
    with redis.Redis.from_url(as_role("", url)) as client:
        return refused(client)


def refused(client: redis.Redis) -> list[str]:
    """Returns the commands that the server refused to any role since `forget_refusals`. Commands
    inside scripts count, too.

    Leaves out reads of a request's hash by subscribers: each stream tries such a read once.
    """
    entries: Any = client.acl_log()
    return [
        f"{entry['username']} may not {entry['object']} ({entry['context']})"
        for entry in entries
        if entry["username"] in ROLES
        and not (entry["username"] == "subscriber" and ":request:" in entry["object"])
    ]


def forget_refusals(url: str) -> None:
    with redis.Redis.from_url(as_role("", url)) as client:
        client.acl_log_reset()


class QueueClient(redis.Redis):
    """A client for a `RequestQueue`. The client calls each script in the role that calls it in
    production, and sends all other commands as the default user."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._of_role: dict[str, redis.Redis] = {}

    def register_script(self, script: Any) -> Script:
        role = _role_of(script)
        if role not in self._of_role:
            self._of_role[role] = redis.Redis(**_options(self, role))
        return Script(self._of_role[role], script)

    def close(self) -> None:
        for client in self._of_role.values():
            client.close()
        super().close()


class AsyncQueueClient(redis.asyncio.Redis):
    """A `QueueClient` for an `AsyncRequestQueue`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._of_role: dict[str, redis.asyncio.Redis] = {}

    def register_script(self, script: Any) -> AsyncScript:
        role = _role_of(script)
        if role not in self._of_role:
            self._of_role[role] = redis.asyncio.Redis(**_options(self, role))
        return AsyncScript(self._of_role[role], script)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        for client in self._of_role.values():
            await client.aclose()
        await super().aclose(close_connection_pool)


def _role_of(script: str) -> str:
    [name] = [it for it in SCRIPT_NAMES if script.endswith(script_text(it))]
    return _ROLE_OF_SCRIPT[name]


def _options(client: Any, role: str) -> dict[str, Any]:
    known = client.connection_pool.connection_kwargs
    where = {name: known[name] for name in ("host", "port", "db")}
    return {**where, "username": role, "password": password_of(role)}
