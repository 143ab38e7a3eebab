"""Logs of libraries look like ours."""

from __future__ import annotations

import json
import subprocess
import sys

LIBRARY = """
import logging
from shared.logs import configure_logs, take_over_logs

configure_logs("info", "json")
logger = logging.getLogger("somebody")
logger.addHandler(logging.StreamHandler())
logger.propagate = False
take_over_logs("somebody")
logging.getLogger("somebody.deep").warning("careful")
"""


def test_a_library_that_brings_a_handler_says_each_line_once_and_as_all_others() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=True
    )
    [line] = [json.loads(line) for line in done.stderr.splitlines()]
    assert (line["event"], line["logger"]) == ("careful", "somebody.deep")
