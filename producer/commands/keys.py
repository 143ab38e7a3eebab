"""Commands about the gateway's API keys."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from typing import Annotated

import typer

from promptq.producer.admin.api_keys import MAX_RATE, SCOPES, ApiKey
from promptq.producer.commands.client import open_client
from promptq.producer.commands.options import AsJson, Queue, Redis
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import MAX_PRIORITY

_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MOST_SECONDS = 1000 * 365 * 86_400
_DURATION = re.compile(r"([0-9]{1,6})([mhdw])")

keys = typer.Typer(
    name="keys",
    no_args_is_help=True,
    help="API keys of the gateway. Without any key, it answers only on this machine.",
)


@keys.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, as in logs.")],
    tenant: Annotated[
        str | None,
        typer.Option(
            help="The tenant of the key. Its requests use that tenant's share, and it sees that"
            " tenant's files. Default: a separate tenant with the key's name."
        ),
    ] = None,
    weight: Annotated[
        float | None, typer.Option(min=0.000001, max=1e6, help="The tenant's weight in the queue.")
    ] = None,
    highest_priority: Annotated[
        int,
        typer.Option(
            min=-MAX_PRIORITY,
            max=MAX_PRIORITY,
            help="The most urgent priority that its requests may have; lower runs sooner.",
        ),
    ] = 0,
    requests_per_minute: Annotated[int, typer.Option(min=0, max=MAX_RATE, help="0: no limit.")] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option(min=0, max=MAX_RATE, help="Prompts and output together; 0: no limit.")
    ] = 0,
    admin: Annotated[
        bool, typer.Option("--admin", help="The key may see and control the whole queue.")
    ] = False,
    scope: Annotated[
        list[str] | None,
        typer.Option(metavar="SCOPE", help=f"APIs: {', '.join(SCOPES)}. Repeatable. Default: all."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="A model that it may use. Repeatable. Default: all."),
    ] = None,
    expires_in: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long the key is valid, such as 12h or 30d."),
    ] = None,
    expires_at: Annotated[
        str | None,
        typer.Option(
            metavar="DATE",
            help="When the key stops being valid: 2030-01-31, or 2030-01-31T18:00+01:00 with a"
            " time zone; otherwise, this machine's time zone applies.",
        ),
    ] = None,
    as_json: AsJson = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Create a key and print it. It cannot be printed again.

    Once a key exists, the gateway refuses calls without a key.

    Examples:

    promptq keys create alice --admin
    promptq keys create web --tenant web --weight 3 --tokens-per-minute 100000
    promptq keys create nightly --scope files --scope batches --expires-in 90d
    """
    key = ApiKey.build(
        name=name,
        tenant=tenant,
        highest_priority=highest_priority,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        is_admin=admin,
        scopes=tuple(dict.fromkeys(scope)) if scope else None,
        models=tuple(dict.fromkeys(model)) if model else None,
        expires_at=_expiry(expires_in, expires_at),
    )
    with open_client(redis, queue) as client:
        secret, created = client.create_api_key(key, weight)
    print(json.dumps({"key": secret, **created.model_dump()}) if as_json else secret)


@keys.command("list")
def list_keys(as_json: AsJson = False, redis: Redis = None, queue: Queue = None) -> None:
    """List the keys, with the rights and the last use of each.

    Examples:

    promptq keys list
    """
    with open_client(redis, queue) as client:
        listed = client.api_keys()
    if as_json:
        print(json.dumps([key.model_dump() for key in listed], indent=2))
        return
    from promptq.producer.commands.screens.render import api_keys_list
    from promptq.producer.commands.screens.terminal import console_for_list

    if listed:
        console = console_for_list()
        console.print(api_keys_list(listed, console.width))
    else:
        print("no keys: the gateway answers only on this machine")


@keys.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.")],
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Make a key invalid at once.

    Open pages of the dashboard close within seconds. Completions that have begun
    continue to their end.

    Examples:

    promptq keys revoke web
    """
    with open_client(redis, queue) as client:
        key = client.revoke_api_key(name)
        left = len(client.api_keys())
    print(f"revoked {key.name} (…{key.hint})")
    if not left:
        print("no keys are left: the gateway answers only on this machine")


def _expiry(expires_in: str | None, expires_at: str | None) -> int:
    """Returns the expiry in Unix milliseconds; 0 without options. Raises ConfigurationError."""
    if expires_in is not None and expires_at is not None:
        raise ConfigurationError("expires-in: cannot be given together with --expires-at")
    now = time.time()
    if expires_in is not None:
        if (match := _DURATION.fullmatch(expires_in)) is None:
            raise ConfigurationError(
                f"expires-in: {expires_in!r} is not a number of minutes, hours, days or weeks, such"
                " as 30m, 12h, 90d or 4w"
            )
        seconds = int(match[1]) * _SECONDS[match[2]]
        if not 0 < seconds <= _MOST_SECONDS:
            raise ConfigurationError(
                f"expires-in: {expires_in!r} is not more than 0, or is more than 1000 years"
            )
        return int((now + seconds) * 1000)
    if expires_at is None:
        return 0
    try:
        at = datetime.fromisoformat(expires_at).timestamp()
    except (ValueError, OverflowError):
        raise ConfigurationError(
            f"expires-at: {expires_at!r} is not a date such as 2030-01-31 or 2030-01-31T18:00+01:00"
        ) from None
    if at <= now:
        raise ConfigurationError(f"expires-at: {expires_at!r} is in the past")
    return int(at * 1000)
