"""`promptq acl`: users for the server, one for each role on a queue."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from promptq.shared.server.acl import ROLES, acl_file


def acl(
    queues: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[QUEUE]...", help="Names of queues, '*' for all; default: `default`."
        ),
    ] = None,
) -> None:
    """Print users for a server's ACL file, with new random passwords.

    One for each role (docs/security.md says what each may do); those of another queue
    than `default` end in its name. The server reads the file at its start, or when an
    administrator sends ACL LOAD.

    Examples:

    (umask 077; promptq acl > users.acl); redis-server --aclfile users.acl
    promptq acl default gold
    """
    users = [
        acl_file(queue, {role: secrets.token_urlsafe(24) for role in ROLES})
        for queue in queues or ["default"]
    ]
    print("user default off")
    print(f"user admin on >{secrets.token_urlsafe(24)} ~* &* +@all")
    print("".join(users), end="")
