"""`promptq top`: the dashboard's overview in a terminal."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from promptq.producer.command_options import Queue, Redis, open_client
from promptq.shared.errors import RedisSideError

if TYPE_CHECKING:
    from rich.console import Console

    from promptq.producer.admin.overview import Overview
    from promptq.producer.clients.sync_client import Client
    from promptq.shared.protocol.worker_stats import Sample

REFRESH_SECONDS = 1.0
_HOUR_MS = 3_600_000


class LastHour:
    """Samples of the queue's statistics in the last hour. Each call reads only new ones."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._samples: list[Sample] = []

    def read(self, now_ms: int) -> list[Sample]:
        since = self._samples[-1].at + 1 if self._samples else 0
        self._samples += self._client.statistics(since)
        self._samples = [it for it in self._samples if it.at > now_ms - _HOUR_MS]
        return self._samples


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print it once and exit, as in a pipe.")
    ] = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Watch the queue and its workers, updated every second. q or Ctrl-C exits.

    Examples:

    promptq top
    promptq top --queue chat --once
    """
    from promptq.producer.commands.screens.overview_screen import overview_screen
    from promptq.producer.commands.screens.terminal import SafeConsole

    console = SafeConsole()
    with open_client(redis, queue) as client:
        hour = LastHour(client)

        def look() -> Any:
            overview: Overview = client.overview()
            return overview_screen(overview, hour.read(overview.now_ms), console.width)

        if once or not console.is_terminal or console.is_dumb_terminal:
            console.print(look())
        else:
            _watch(console, look)


def _watch(console: Console, look: Callable[[], Any]) -> None:
    """Show it until the user exits. Raises what the first look raises."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    shown = look()
    with (
        _keys() as key_pressed,
        Live(shown, console=console, screen=True, auto_refresh=False) as live,
    ):
        try:
            while True:
                live.update(shown, refresh=True)
                if b"q" in key_pressed(REFRESH_SECONDS).lower():
                    return
                try:
                    shown = look()
                except RedisSideError as error:
                    shown = Group(Text(str(error), style="bold red"), shown)
        except KeyboardInterrupt:
            return


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """Give a function that waits some seconds for keys, and gives them. They are not echoed."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key(seconds: float) -> bytes:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 64) if ready else b""


def _no_key(seconds: float) -> bytes:
    time.sleep(seconds)
    return b""
