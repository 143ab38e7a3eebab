"""Commands about the gateway's API keys."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.command_options import AsJson, Queue, Redis, open_client

keys = typer.Typer(
    name="keys",
    no_args_is_help=True,
    help="API keys of the gateway. Without any, it answers on this machine alone.",
)


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="What to call it; appears in logs.")],
    tenant: Annotated[
        str | None,
        typer.Option(help="Whose share its requests use; default: nobody's in particular."),
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(min=0.000001, max=1e6, help="The tenant's weight in the queue."),
    ] = None,
    highest_priority: Annotated[
        int, typer.Option(help="The lowest number it may ask for; lower runs sooner.")
    ] = 0,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option(min=0, help="Prompt and `max_tokens` together; 0: no limit.")
    ] = 0,
    admin: Annotated[
        bool, typer.Option("--admin", help="May see and steer the whole queue.")
    ] = False,
    as_json: AsJson = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Make a key and print it; it cannot be shown again.

    From the first key on, the gateway takes nobody without one.

    Examples:

    promptq keys create operator --admin
    promptq keys create web --tenant web --weight 3 --tokens-per-minute 100000
    """
    key = ApiKey.build(
        name=name,
        tenant=tenant,
        highest_priority=highest_priority,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        is_admin=admin,
    )
    with open_client(redis, queue) as client:
        secret, made = client.create_api_key(key, weight)
    print(json.dumps({"key": secret, **made.model_dump()}) if as_json else secret)


@keys.command("list")
def list_keys(as_json: AsJson = False, redis: Redis = None, queue: Queue = None) -> None:
    """List the keys and what each allows.

    Examples:

    promptq keys list
    """
    with open_client(redis, queue) as client:
        found = client.api_keys()
    if as_json:
        print(json.dumps([key.model_dump() for key in found], indent=2))
        return
    from promptq.producer.commands.screens.render import api_keys_table
    from promptq.producer.commands.screens.terminal import SafeConsole

    if found:
        console = SafeConsole()
        console.print(api_keys_table(found, console.width))
    else:
        print("no keys: the gateway answers on this machine alone")


@keys.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Let nobody in with a key from now on.

    Open pages of the dashboard end within seconds; completions that have begun run to their end.

    Examples:

    promptq keys revoke web
    """
    with open_client(redis, queue) as client:
        key = client.revoke_api_key(name)
        left = len(client.api_keys())
    print(f"revoked {key.name} (…{key.hint})")
    if not left:
        print("no keys are left: the gateway answers on this machine alone")
