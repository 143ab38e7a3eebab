"""The `promptq` command with all its commands.

Examples in the docstrings of commands are not indented, because Typer indents only some of them.
"""

from __future__ import annotations

import gc
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from promptq.shared.runtime.quick_imports import quick_imports

_PACKAGE = "promptq.producer.commands"
_PANELS = {
    "Processes": {
        "up": "starting",
        "worker": "starting",
        "supervise": "starting",
        "gateway": "gateway",
        "jobs": "batches",
        "server": "starting",
        "demo": "starting",
    },
    "Requests": {
        "submit": "requests",
        "fork": "requests",
        "watch": "requests",
        "place": "requests",
        "embed": "requests",
        "cancel": "requests",
        "reprioritise": "queue",
        "batch": "batches",
    },
    "Queue": {
        "stats": "queue",
        "top": "top",
        "scaling": "queue",
        "pause": "queue",
        "resume": "queue",
        "drain": "queue",
        "acl": "server_access",
        "settings": "settings",
        "url": "server_access",
        "models": "models",
        "dead": "queue",
        "keys": "keys",
        "webhooks": "webhooks",
    },
}
"""The module of each command, grouped and ordered as in `promptq --help`."""

_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names}


class _Group(TyperGroup):
    """Loads the module of a command when the command is first needed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _PANEL_OF  # only the names are used

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _load(cmd_name) if cmd_name in _PANEL_OF else None


class _ForWorker(TyperCommand):
    """A command that passes unknown options, and arguments after `--`, to a worker."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, args[:end])
        ctx.args += args[end:]
        return [*ctx.args]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(version("promptq"))
        except PackageNotFoundError:
            print("not installed as a package")
        raise typer.Exit


app = typer.Typer(
    name="promptq",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


_PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
_FOR_WORKER: dict[str, dict[str, Any]] = {
    "up": _PASS_ON,
    "worker": {**_PASS_ON, "help_option_names": []},
    "demo": _PASS_ON,
    "supervise": {},  # the worker's arguments are after `--`
}


@cache
def _load(name: str) -> Any:
    panel = _PANEL_OF[name]
    with quick_imports():
        command = getattr(import_module(f"{_PACKAGE}.{_PANELS[panel][name]}"), name)
    gc.freeze()  # modules stay, so no collection must search them
    gc.enable()
    alone = typer.Typer(rich_markup_mode="rich")
    if isinstance(command, typer.Typer):
        alone.add_typer(command, rich_help_panel=panel)
    elif name in _FOR_WORKER:
        settings = _FOR_WORKER[name]
        alone.command(cls=_ForWorker, context_settings=settings, rich_help_panel=panel)(command)
    else:
        alone.command(rich_help_panel=panel)(command)
    return get_group(alone).commands[name]
