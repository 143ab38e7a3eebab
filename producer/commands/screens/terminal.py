"""Prints text of strangers safely.

A terminal obeys escape sequences, and some characters hide what is beside them. So each unsafe
character is written as an escape like `\\x1b`. Only if standard output is not a terminal, a text
is printed as it is, for the program that reads it. Tables and messages are always escaped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from promptq.shared.runtime.printable import printable


def write(text: str, end: str = "\n") -> None:
    """Print to standard output at once. Line breaks and tabs stay."""
    shown = printable(text, keep="\n\t") if sys.stdout.isatty() else text
    print(shown, end=end, flush=True)


def console_for_list() -> SafeConsole:
    """A console for lists. If the output is not a terminal, no cell is wrapped."""
    console = SafeConsole()
    if not console.is_terminal:
        console.width = 10_000
    return console


class SafeConsole(Console):
    """A console that escapes unsafe characters in all texts, but not its own styles and moves.

    Text of a stranger must still be a `Text`, because a plain string may contain markup.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Renders like any console, but with printable text only."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text, keep="\n"), segment.style)
