"""The `promptq` command with all its commands.

Examples in the docstrings of commands are not indented: Typer indents those of some commands only.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from promptq.producer.commands.admin.keys import keys
from promptq.producer.commands.admin.models import models
from promptq.producer.commands.admin.server_access import acl, url
from promptq.producer.commands.admin.webhooks import webhooks
from promptq.producer.commands.batches import batch, jobs
from promptq.producer.commands.queue import dead, drain, pause, reprioritise, resume, scaling, stats
from promptq.producer.commands.requests import cancel, embed, fork, submit, watch
from promptq.producer.commands.settings import settings
from promptq.producer.commands.starting import demo, server, supervise, up, worker
from promptq.producer.commands.top import top
from promptq.producer.gateway.server import gateway

app = typer.Typer(
    name="promptq",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _ForWorker(TyperCommand):
    """Leaves options that it does not know for a worker, if it may, and `--` and what follows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, args[:end])
        ctx.args += args[end:]
        return [*ctx.args]


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            print(version("promptq"))
        except PackageNotFoundError:
            print("not installed as a package")
        raise typer.Exit


@app.callback()
def promptq(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """A message-queue worker service for language models: Redis is its API.

    Start a server and a worker in one terminal (with --port also HTTP), use them in another:

    promptq up
    promptq submit "Once upon a time"
    """


_PANELS: dict[str, tuple[Any, ...]] = {
    "Processes": (up, worker, supervise, gateway, jobs, server, demo),
    "Requests": (submit, fork, watch, embed, cancel, reprioritise, batch),
    "Queue": (
        *(stats, top, scaling, models, pause, resume, drain, dead, keys, webhooks),
        *(acl, settings, url),
    ),
}
_PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
_FOR_WORKER: dict[object, dict[str, Any]] = {
    up: _PASS_ON,
    worker: {**_PASS_ON, "help_option_names": []},
    demo: _PASS_ON,
    supervise: {},  # all of it is behind `--`
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, rich_help_panel=_panel)
        elif _command in _FOR_WORKER:
            app.command(
                cls=_ForWorker, context_settings=_FOR_WORKER[_command], rich_help_panel=_panel
            )(_command)
        else:
            app.command(rich_help_panel=_panel)(_command)
