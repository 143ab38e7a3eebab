"""Prints tables and messages with untrusted text safely.

A terminal obeys escape sequences, and some characters hide their neighbours. So each unsafe
character is written as an escape like `\\x1b`, even if the output is not a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from promptq.shared.runtime.printable import printable


def console_for_list() -> SafeConsole:
    """Returns a console for lists. If the output is not a terminal, table cells are not wrapped."""
    console = SafeConsole()
    if not console.is_terminal:
        console.width = 10_000
    return console


class SafeConsole(Console):
    """A console that escapes unsafe characters in texts. Styles and cursor movements still work.

    Pass untrusted text as a `Text`, because a plain string may contain markup.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text, keep="\n"), segment.style)
