"""Makes untrusted text safe to show: some characters control a terminal or mislead readers."""

from __future__ import annotations

import re
import sys

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: C0, DEL and C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the order in which text is shown
    "\u2028\u2029"  # end a line for some readers
    "\ud800-\udfff]"  # surrogates, which UTF-8 cannot encode
)


def printable(text: str, keep: str = "") -> str:
    r"""Returns the text with unsafe characters escaped, such as `\x1b`, except those in `keep`."""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else _escaped(match[0]), text)


def one_line(json_text: str) -> str:
    """Returns the JSON on one line. Escapes three characters that JSON allows unescaped: functions
    such as `str.splitlines` read them as the end of a line."""
    for end in ("\x85", "\u2028", "\u2029"):
        json_text = json_text.replace(end, f"\\u{ord(end):04x}")
    return json_text


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def write(text: str, end: str = "\n") -> None:
    """Prints to standard output, and flushes. Escapes unsafe characters, but only for a
    terminal."""
    print(printable(text, keep="\n\t") if sys.stdout.isatty() else text, end=end, flush=True)
