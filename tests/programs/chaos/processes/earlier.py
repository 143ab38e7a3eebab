"""An earlier release beside this one, on the same queues, as while a fleet is updated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.programs.chaos.processes.group import ForkedMember, ProcessGroup
from tests.support.fork_server import ForkServer, fork_server
from tests.support.paths import ROOT

LAST_RELEASE = "0.2.0"
REVISION = "9d8ec56"
"""The commit of the last release. The next release changes both constants."""

SHARES = (1.0, 0.5, 0.0, 0.5, 1.0, 0.5)
"""The earlier release's share of the fleet in each part of a run. The fleet is updated, rolled
back, and updated again to half."""

EARLIER_LOG = ".earlier.log"
"""The ending of the names of logs of the earlier release's workers."""

_LIBRARIES = ("tests.chaos.chaotic_worker", "promptq.worker.engine.model.model_runner")
_WORK = "from tests.chaos import chaotic_worker; chaotic_worker.main()"
"""Names of the last release; this release has both elsewhere."""


@dataclass(frozen=True, slots=True)
class Release:
    """A checkout of an earlier release, and an interpreter with its packages."""

    name: str
    folder: Path
    python: Path
    clients = "tests.chaos.clients"
    """The module of its clients, as the last release names it."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which Python finds the release's code."""
        return {**os.environ, "PYTHONPATH": self._path}

    @property
    def _path(self) -> str:
        return os.pathsep.join((f"{self.folder}/src", str(self.folder)))

    @property
    def server(self) -> ForkServer:
        """The fork server for the release's workers and clients."""
        return fork_server(_LIBRARIES, str(self.python), PYTHONPATH=self._path)

    def start_worker(
        self, arguments: Sequence[str], environment: Mapping[str, str], group: ProcessGroup
    ) -> ForkedMember:
        environment = {**self.environment, **environment}
        options: dict[str, Any] = {"cwd": self.folder, "env": environment}
        return group.fork(self.server, "-c", _WORK, *arguments, **options)


def check_out(folder: Path, *, own_environment: bool) -> Release:
    """Check out the last release in `folder`. Raises CalledProcessError if the clone lacks the
    release's history.

    With `own_environment`, the release gets the package versions of its time, which takes a minute
    or two to install. Otherwise the release uses the installed packages.
    """
    clone = ["git", "clone", "--quiet", str(ROOT), str(folder)]
    subprocess.run(clone, check=True, capture_output=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", REVISION], check=True)
    python = Path(sys.executable)
    if own_environment:
        subprocess.run(["make", "-C", str(folder), ".venv/.set-up"], check=True)
        python = folder / ".venv" / "bin" / "python"
    return Release(LAST_RELEASE, folder, python)
