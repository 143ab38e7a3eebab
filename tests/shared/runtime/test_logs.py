"""Logs of libraries look like ours."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

LIBRARY = """
import logging
from promptq.shared.runtime.logs import configure_logs, take_over_logs

configure_logs("info", "json")
logger = logging.getLogger("somebody")
logger.addHandler(logging.StreamHandler())
logger.propagate = False
logging.getLogger("transformers").setLevel(logging.WARNING)
take_over_logs("somebody", "transformers")
logging.getLogger("somebody.deep").warning("careful")
logging.getLogger("transformers.deep").warning("install other kernels")
"""


def test_a_library_that_brings_a_handler_says_each_line_once_and_as_all_others() -> None:
    """But for advice of transformers, which sets its level when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=True
    )
    [line] = [json.loads(line) for line in done.stderr.splitlines()]
    assert (line["event"], line["logger"]) == ("careful", "somebody.deep")


def test_at_a_terminal_lines_are_in_colour() -> None:
    """And for people: a terminal gets no JSON, unless it is asked for."""
    script = """
import sys
from promptq.shared.runtime.logs import configure_logs, get_logger

for form in ("auto", "json"):
    configure_logs("info", form)
    get_logger().warning("careful", request_id="r1")
"""
    ours, theirs = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", script], stderr=theirs, check=True)
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    coloured, plain = shown.splitlines()
    assert "\x1b[" in coloured
    assert all(word in coloured for word in ("warning", "careful", "request_id", "r1"))
    assert "{" not in coloured
    assert json.loads(plain)["request_id"] == "r1"


def test_lines_of_threads_stay_apart() -> None:
    """Also those of one that uses the standard `logging`, as the engine does."""
    script = """
import logging, sys, threading
from promptq.shared.runtime.logs import configure_logs, get_logger

configure_logs("info", "json")
sys.setswitchinterval(1e-6)
engine, own = logging.getLogger("promptq.worker.engine"), get_logger()
say = [lambda n: engine.warning("engine %d", n), lambda n: own.warning("own", n=n)]
threads = [threading.Thread(target=lambda it=it: [it(n) for n in range(2000)]) for it in say]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert len(lines) == 4000
