"""Processes that a benchmark starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def child(*args: str, **environment: str) -> Iterator[tuple[int, str]]:
    """Run a module in a child process until the end of the context. Yields the process id and the
    ready line."""
    process = subprocess.Popen(
        [sys.executable, "-m", *args],
        stdout=subprocess.PIPE,
        text=True,
        # Not a line for each request.
        env={**os.environ, "PROMPTQ_LOG_LEVEL": "warning", **environment},
    )
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        if not said.startswith("ready"):
            raise RuntimeError(f"{' '.join(args)} did not start: {said}")
        yield process.pid, said
    finally:
        process.terminate()
        process.communicate()
