"""JSON that readers of lines take for one line."""

from __future__ import annotations

_ENDS = ("\x85", "\u2028", "\u2029")
"""Characters that end a line for `str.splitlines` and its like. JSON may have them raw. It always
escapes the other ones."""


def one_line(text: str) -> str:
    """The JSON text with these characters escaped."""
    for end in _ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text
