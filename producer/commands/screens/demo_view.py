"""The screens of the demo: a panel for each request while requests run, then a table."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from promptq.producer.commands.screens.render import fitting, milliseconds, plain_table
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import FinishReason

_MIN_PANEL_WIDTH = 24
_MAX_COLUMNS = 6
_FRAME = 2  # lines of a panel that are not text
_COLOURS = {
    "waiting": "dim",
    "running": "cyan",
    "stop": "green",
    "length": "green",
    "cancelled": "red",
    "expired": "red",
    "error": "red",
}


@dataclass
class Shown:
    """The client's view of a request. Times are seconds of a monotonic clock."""

    title: str
    priority: int
    prompt: str
    text: str = ""
    num_tokens: int = 0
    enqueued: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    queue_ms: float | None = None
    worker_rate: float | None = None
    finish_reason: FinishReason | None = None
    error: str = ""

    @property
    def state(self) -> str:
        if self.finish_reason is not None:
            return self.finish_reason.value
        return "waiting" if self.first_token is None else "running"

    @property
    def first_token_ms(self) -> float | None:
        """Milliseconds from enqueueing to the first token, by the client's clock; None before."""
        return None if self.first_token is None else (self.first_token - self.enqueued) * 1000

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second by the worker's statistics or the client's clock; None if unknown."""
        if self.worker_rate:
            return self.worker_rate
        if self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.num_tokens - 1) / max(self.last_token - self.first_token, 1e-9)

    def add(self, event: TokenEvent) -> None:
        """Records the stream's next event."""
        if event.token_ids:
            self.last_token = time.monotonic()
            self.first_token = self.first_token or self.last_token
        self.text += event.text
        self.num_tokens = event.end
        self.finish_reason = event.finish_reason
        if event.stats is not None:
            self.queue_ms = event.stats.queue_ms
            self.worker_rate = event.stats.tokens_per_second
        if event.error is not None:
            self.error = event.error.message


class Board:
    """A panel for each request, side by side. The terminal's size limits a panel's lines."""

    def __init__(self, shown: Sequence[Shown], slots: int) -> None:
        self._shown = shown
        self._slots = slots

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._headline()
        height = (options.height or console.height) - 2
        columns, lines = _grid(len(self._shown), options.max_width, height)
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        width = options.max_width // columns - 4
        panels = [_panel(shown, width, lines) for shown in self._shown]
        for start in range(0, len(panels), columns):
            grid.add_row(*panels[start : start + columns])
        yield grid

    def _headline(self) -> Text:
        states = [shown.state for shown in self._shown]
        waiting, running = states.count("waiting"), states.count("running")
        done = len(states) - waiting - running
        return Text.from_markup(
            f"[bold]{len(states)} requests, {self._slots} slots[/]   "
            f"{waiting} waiting · [cyan]{running} running[/] · [green]{done} done[/]"
        )


def _grid(count: int, width: int, height: int) -> tuple[int, int]:
    """Returns (panels per row, lines per panel) of the layout that shows the most text."""

    def lines(columns: int) -> int:
        return height // -(-count // columns) - _FRAME

    most = max(1, min(_MAX_COLUMNS, count, width // _MIN_PANEL_WIDTH))
    if lines(most) < 1:  # not all panels fit; the rest is cropped
        return most, 1
    best = max(range(1, most + 1), key=lambda columns: lines(columns) * (width // columns - 4))
    return best, lines(best)


def _panel(shown: Shown, width: int, lines: int) -> Panel:
    colour = _COLOURS[shown.state]
    text = Text()
    tail = textwrap.wrap(shown.prompt + shown.text, width)[-lines:]
    text.append("\n".join(tail))
    if shown.state == "waiting":
        text.stylize("dim")
    tokens = f" · {shown.num_tokens}" if shown.num_tokens else ""
    return Panel(
        text,
        title=f"{escape(shown.title)} [dim]({shown.priority:+d})[/]",
        subtitle=f"{shown.state}{tokens}",
        title_align="left",
        subtitle_align="right",
        border_style=colour,
        height=lines + _FRAME,
    )


def finished_text(shown: Shown) -> Text:
    """Returns the text of an ended request, for output that is not a terminal."""
    headline = f"── {shown.title} (priority {shown.priority:+d}): {shown.state},"
    headline += f" {shown.num_tokens} tokens ──\n"
    return Text(headline + (shown.error or shown.prompt + shown.text).strip() + "\n")


def requests_table(shown: Sequence[Shown], width: int) -> Table:
    """Returns a table of the requests' times, for a terminal of this width."""
    columns = {
        "request": [one.title for one in shown],
        "priority": [f"{one.priority:+d}" for one in shown],
        "queued": [milliseconds(one.queue_ms) for one in shown],
        "first token": [milliseconds(one.first_token_ms) for one in shown],
        "tokens": [f"{one.num_tokens}" for one in shown],
        "tokens/s": [_rate(one.tokens_per_second) for one in shown],
        "finish": [one.state for one in shown],
    }
    kept = fitting(columns, width, ("tokens/s", "tokens", "first token", "queued", "priority"))
    table = plain_table(*kept, title="requests", left=("request", "finish"))
    for one, *cells in zip(shown, *kept.values(), strict=True):
        *others, finish = map(Text, cells)
        finish.stylize(_COLOURS[one.state])
        table.add_row(*others, finish)
    return table


def _rate(tokens_per_second: float | None) -> str:
    return "–" if tokens_per_second is None else f"{tokens_per_second:,.0f}"
