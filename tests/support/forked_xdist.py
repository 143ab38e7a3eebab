"""Forks xdist's processes from one that has imported the tests' libraries."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from execnet import gateway_io

from tests.support.fork_server import TESTS, ForkedProcess, fork_server, share_fork_servers


class _ForkedIO(gateway_io.Popen2IOMaster):
    """The pipes to a forked process, in place of those to a new interpreter."""

    def __init__(self, args: list[str], execmodel: Any) -> None:
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        command = [sys.executable, "-c", args[-1]]
        self.popen = ForkedProcess(command, server=fork_server(TESTS), **pipes)
        gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)


def install(config: pytest.Config) -> None:
    """Let xdist's processes share the fork servers of this one. Call it before xdist starts them.

    In a run of all tests, xdist's processes are forks. The tests of a single folder need few of the
    libraries.
    """
    folder = tempfile.TemporaryDirectory(prefix="fork-servers-")
    config.add_cleanup(folder.cleanup)
    share_fork_servers(Path(folder.name))
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        gateway_io.Popen2IOMaster = _ForkedIO  # type: ignore[misc]
