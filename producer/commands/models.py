"""Commands about the models of a server's queues, and their aliases."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from promptq.producer.commands.client import open_client
from promptq.producer.commands.options import AsJson, Redis
from promptq.shared.runtime.printable import printable

models = typer.Typer(
    name="models",
    no_args_is_help=True,
    help="The models that the queues of a server serve, and their aliases.",
)


@models.command("list")
def list_models(as_json: AsJson = False, redis: Redis = None) -> None:
    """List the models, with one line for each queue.

    `longest` is the most tokens that prompt and output may have together.
    `refuses` lists the request fields that every worker refuses.

    Examples:

    promptq models list
    """
    with open_client(redis, None) as client:
        listed = client.models()
    if as_json:
        print(json.dumps([asdict(model) for model in listed], indent=2))
        return
    if not listed:
        print("no models: no worker has come to a queue of this server yet")
        return
    from rich.text import Text

    from promptq.producer.commands.screens.render import num_workers_of, number, plain_table
    from promptq.producer.commands.screens.terminal import console_for_list

    rows = [(model, view) for model in listed for view in model.queues]
    columns = {
        "model": [model.name for model, _ in rows],
        "queue": [view.queue for _, view in rows],
        "workers": [num_workers_of(view) for _, view in rows],
        "waiting": [number(view.num_waiting) for _, view in rows],
        "active": [number(view.num_active) for _, view in rows],
        "longest": [number(view.max_model_len) for _, view in rows],
        "also called": [", ".join(model.aliases) for model, _ in rows],
        "refuses": [", ".join(view.refused) for _, view in rows],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    table = plain_table(*kept, left=("model", "queue", "also called", "refuses"))
    for row in zip(*kept.values(), strict=True):
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = console_for_list()
    console.print(table)
    for model in listed:
        if not any(view.has_worker for view in model.queues):
            name = printable(model.name)
            advice = "If no worker will serve it again: promptq models forget"
            console.print(Text(f"No worker serves {name}. {advice} {shlex.quote(name)}"))


@models.command()
def alias(
    name: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias, such as gpt-4o.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's own name.")],
    redis: Redis = None,
) -> None:
    """Give a model an alias, for example for a program that accepts only certain names.

    Examples:

    promptq models alias gpt-4o qwen3
    """
    with open_client(redis, None) as client:
        client.set_alias(name, model)


@models.command()
def forget(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An alias, or an unserved model.")],
    redis: Redis = None,
) -> None:
    """Delete an alias, or a model that no worker serves.

    The model's queues can then serve other models. The command fails if one of
    these queues still has requests.

    Examples:

    promptq models forget gpt-4o
    """
    with open_client(redis, None) as client:
        queues = client.forget_model(name)
    for queue in queues:
        print(f"queue {queue} no longer has a model")
