"""`promptq acl`: users for the server, one for each role on a queue."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from promptq.shared.errors import ConfigurationError
from promptq.shared.server.acl import ALL_QUEUES, ROLES, acl_file


def acl(
    queues: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[QUEUE]...", help="Names of queues, '*' for all; default: `default`."
        ),
    ] = None,
) -> None:
    """Print users for a server's ACL file, with new random passwords.

    One for each role; docs/security.md says what each may do. Names of users
    of another queue than `default` end in its name. The server reads the file
    when it starts, or when the user `admin` sends ACL LOAD.

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
