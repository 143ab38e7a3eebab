"""Commands about access to the Redis server: `promptq url` and `promptq acl`."""

from __future__ import annotations

import secrets
import time
from typing import Annotated
from urllib.parse import unquote, urlsplit, urlunsplit

import typer

from promptq.producer.clients.connecting import HOW_TO_GET_A_SERVER, server_url
from promptq.producer.commands.options import Redis
from promptq.shared.errors import ConfigurationError, RedisUnavailableError
from promptq.shared.protocol.keys import ALL_QUEUES
from promptq.shared.server.acl import ROLES, acl_file
from promptq.shared.server.advertised import advertised
from promptq.shared.server.connection import make_async_redis

_LOOK_SECONDS = 0.1


def url(
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Print the address of the embedded server on this port, even if"
            " PROMPTQ_REDIS_URL is set.",
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a server that is about to start.")
    ] = 0.0,
    password: Annotated[
        bool, typer.Option("--password", help="Print the password alone, for REDISCLI_AUTH.")
    ] = False,
    redis: Redis = None,
) -> None:
    """Print the address of the server that commands talk to, with its password.

    The embedded server has a new password at each start. If the machine has other
    users, they can see command lines: pass the password in the environment.

    Examples:

    redis-cli -u "$(promptq url)" ping
    REDISCLI_AUTH="$(promptq url --password)" redis-cli -p 6399 ping
    """
    address = _for_redis_cli(_wait_for_url(redis, port, wait))
    make_async_redis(address)  # raises for a wrong address, which redis-cli may accept
    if not password:
        print(address)
        return
    secret = urlsplit(address).password
    if secret is None:
        raise ConfigurationError("the server's address has no password")
    print(unquote(secret))


def acl(
    queues: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="QUEUE", help="Names of queues, or '*' for all; default: `default`."
        ),
    ] = None,
) -> None:
    """Print users for a server's ACL file, with new random passwords.

    There is one user for each role; docs/security.md says what each may do. If
    a queue is not `default`, its users' names end in the queue's name. The server
    reads the file when it starts, or when the user `admin` sends ACL LOAD.

    Examples:

    (umask 077; promptq acl > users.acl)
    redis-server --bind 127.0.0.1 --aclfile "$PWD/users.acl"
    promptq acl default gold
    """
    names = list(dict.fromkeys(queues or ["default"]))
    if ALL_QUEUES in names and len(names) > 1:
        raise ConfigurationError(f"queue: {ALL_QUEUES!r} is all queues; give it alone")
    users = [acl_file(name, {role: secrets.token_urlsafe(24) for role in ROLES}) for name in names]
    print("user default off")
    print(f"user admin on >{secrets.token_urlsafe(24)} ~* &* +@all")
    print("".join(users), end="")


def _wait_for_url(redis: str | None, port: int | None, seconds: float) -> str:
    give_up_at = time.monotonic() + seconds
    while True:
        try:
            if port is None:
                return server_url(redis)
            if (url := advertised(port)) is not None:
                return url
            raise RedisUnavailableError(
                f"--port: no embedded server of yours listens on port {port}: {HOW_TO_GET_A_SERVER}"
            )
        except RedisUnavailableError:
            if time.monotonic() >= give_up_at:
                raise
        time.sleep(_LOOK_SECONDS)


def _for_redis_cli(url: str) -> str:
    """Returns the address with a user name, which redis-cli needs before a password."""
    parts = urlsplit(url)
    if not parts.netloc.startswith(":"):
        return url
    return urlunsplit(parts._replace(netloc=f"default{parts.netloc}"))
