"""Nothing that a stranger wrote reaches a terminal or a log as anything but text."""

from __future__ import annotations

import subprocess
import sys
import unicodedata

import pytest

from promptq.shared.runtime.printable import printable

HOSTILE = "\x1b]0;owned\x07\x9b31m\x7f\r\n12:00:00 [info     ] forged\u202e\u2066\u2028\ud800"

SCRIPT = f"""
import logging
from promptq.shared.runtime.logs import configure_logs, get_logger

hostile = {HOSTILE!r}
configure_logs("info", FORM)
get_logger().info(hostile, path=hostile, listed=[hostile], error=ValueError(hostile))
logging.getLogger("uvicorn.error").warning("of a library: %s", hostile)
try:
    raise ValueError(hostile)
except ValueError:
    get_logger().exception("failed")
"""


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_log_line_holds_no_character_that_a_terminal_obeys(form: str) -> None:
    """Neither do its values, a library's line or a traceback, in either form."""
    script = SCRIPT.replace("FORM", repr(form))
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", script], capture_output=True, check=True
    )
    shown = done.stderr.decode()
    kinds = {unicodedata.category(letter) for letter in shown.replace("\n", "")}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert "owned" in shown
    assert not any(line.startswith("12:00:00 [info     ] forged") for line in shown.split("\n"))


def test_other_text_stays_as_it_is() -> None:
    assert printable("Grüße, 世界 🎉 \\x1b") == "Grüße, 世界 🎉 \\x1b"
    assert printable("a\tb\nc\x1b", keep="\n\t") == "a\tb\nc\\x1b"
    assert printable("\x9b\u202e\ud800") == "\\x9b\\u202e\\ud800"
