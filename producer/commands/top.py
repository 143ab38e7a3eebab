"""`promptq top`: the dashboard's overview in a terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from promptq.producer.commands.client import names_queue, open_client
from promptq.producer.commands.options import Queue, Redis
from promptq.shared.errors import RedisSideError, SpoiltRecordError

if TYPE_CHECKING:
    from rich.console import Console

    from promptq.producer.admin.overview import Overview
    from promptq.producer.clients.sync_client import Client
    from promptq.shared.protocol.worker_stats import Sample

REFRESH_SECONDS = 1.0
_HINT = "Tab shows the next queue"
_HOUR_MS = 3_600_000


class LastHour:
    """A queue's statistics of the last hour, in samples. Each `read` fetches only new samples."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._samples: list[Sample] = []

    def read(self, now_ms: int) -> list[Sample]:
        since = self._samples[-1].at + 1 if self._samples else 0
        self._samples += self._client.statistics(since)
        self._samples = [sample for sample in self._samples if sample.at > now_ms - _HOUR_MS]
        return self._samples


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print the overview once and exit; default in a pipe.")
    ] = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Watch a queue and its workers, updated every second. q or Ctrl-C exits.

    If the server has several queues, the screen begins with a list of them. Tab
    shows the next queue.

    Examples:

    promptq top
    promptq top --queue chat --once
    """
    from promptq.producer.commands.screens.terminal import SafeConsole

    console = SafeConsole()
    with ExitStack() as stack:
        screen = _Screen(stack, redis, queue)
        if once or not console.is_terminal or console.is_dumb_terminal:
            console.print(screen.look(console.width))
        else:
            _watch(console, screen)


class _Screen:
    """The screen of `promptq top`: the queues, if there are several, and the overview of one queue.

    The clients stay open until `stack` closes. With `--queue`, the screen shows only that queue.
    """

    def __init__(self, stack: ExitStack, redis: str | None, queue: str | None) -> None:
        self._stack = stack
        self._redis = redis
        self._is_named = names_queue(queue)
        self._first = stack.enter_context(open_client(redis, queue))
        self._shown = self._first.queue.keys.queue
        self._names = [self._shown]
        self._opened = {self._shown: (self._first, LastHour(self._first))}
        self._was_chosen = False

    def show_next(self) -> None:
        """Switches to the next queue. After the last queue comes the first."""
        self._was_chosen = True
        at = self._names.index(self._shown) + 1 if self._shown in self._names else 0
        self._shown = self._names[at % len(self._names)]

    def look(self, width: int, hint: str = "") -> Any:
        """Reads the queues. Returns the screen; `hint` stands below a list of several queues."""
        from rich.console import Group

        from promptq.producer.commands.screens.overview_screen import overview_screen, queues_list

        models = [] if self._is_named else self._first.models()
        views = [view for model in models for view in model.queues]
        if views:
            self._names = [view.queue for view in views]
            if self._shown not in self._names and not self._was_chosen:
                self._shown = self._names[0]
        if self._shown not in self._opened:
            client = self._stack.enter_context(open_client(self._redis, self._shown))
            self._opened[self._shown] = client, LastHour(client)
        client, hour = self._opened[self._shown]
        overview: Overview = client.overview()
        screen = overview_screen(overview, hour.read(overview.now_ms), width)
        return Group(queues_list(views, self._shown, hint), screen) if len(views) > 1 else screen


def _watch(console: Console, screen: _Screen) -> None:
    """Shows the screen until the user exits. If a later reading fails, shows the error above the
    last screen."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    shown = screen.look(console.width, _HINT)
    with (
        _Interrupts() as interrupts,
        _keys() as key_pressed,
        Live(shown, console=console, screen=True, auto_refresh=False) as live,
    ):
        try:
            while True:
                live.update(shown, refresh=True)
                with interrupts.raised():
                    pressed = key_pressed(REFRESH_SECONDS).lower()
                    if b"q" in pressed:
                        return
                    if b"\t" in pressed:
                        screen.show_next()
                    try:
                        shown = screen.look(console.width, _HINT)
                    except (RedisSideError, SpoiltRecordError) as error:
                        shown = Group(Text(str(error), style="bold red"), shown)
        except KeyboardInterrupt:
            return


class _Interrupts:
    """Context manager in which Ctrl-C takes effect only inside `with` blocks of `raised`.

    The first Ctrl-C raises KeyboardInterrupt: at once inside such a block, otherwise when the next
    block begins. Further presses do nothing. So each frame is drawn completely, the terminal is
    always restored, and no library's finalizer swallows a Ctrl-C.
    """

    def __init__(self) -> None:
        self._came = False
        self._is_raised = False

    def __enter__(self) -> _Interrupts:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        is_first, self._came = not self._came, True
        if is_first and self._is_raised:
            raise KeyboardInterrupt

    @contextmanager
    def raised(self) -> Iterator[None]:
        self._is_raised = True
        try:
            if self._came:
                raise KeyboardInterrupt
            yield
        finally:
            self._is_raised = False


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """Yields a function that waits up to `seconds` for pressed keys, and returns the keys.

    The terminal does not echo keys.
    """
    keyboard = [sys.stdin] if sys.stdin.isatty() else []

    def wait(seconds: float) -> bytes:
        ready, _, _ = select.select(keyboard, [], [], seconds)
        return os.read(sys.stdin.fileno(), 64) if ready else b""

    if not keyboard:
        yield wait
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
