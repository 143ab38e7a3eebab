"""Output that may hold what strangers wrote, which nothing at the other end is to obey.

A terminal carries out escape sequences, and a text can hide what stands beside it. So each unsafe
character is written as an escape like `\\x1b`. Only a program that reads a text from standard
output, where that is no terminal, gets it as it is; tables and messages are for people anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from promptq.shared.runtime.printable import printable


def write(text: str, end: str = "\n") -> None:
    """Print to standard output at once. Line ends and tabs of the text stay."""
    shown = printable(text, keep="\n\t") if sys.stdout.isatty() else text
    print(shown, end=end, flush=True)


class SafeConsole(Console):
    """Writes its own styles and moves; in every text, unsafe characters are escaped.

    What a stranger wrote must still come as a `Text`, since a plain string may hold markup.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """As for any console, but each piece of text is printable."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text, keep="\n"), segment.style)
