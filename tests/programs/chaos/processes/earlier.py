"""An earlier release beside this one, on the same queues, as while a fleet is updated."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.programs.chaos.processes.group import ProcessGroup
from tests.support.paths import ROOT

LAST_RELEASE = "0.2.0"
REVISION = "9d8ec56"
"""What the last release was made of. The next release moves both."""

SHARES = (1.0, 0.5, 0.0, 0.5, 1.0, 0.5)
"""How much of the fleet is the earlier release in each part of a run: it is updated, rolled
back, and updated again to half."""

EARLIER_LOG = ".earlier.log"
"""How the name of a log ends that workers of the earlier release write."""

_WORK = "from tests.chaos import chaotic_worker; chaotic_worker.main()"
"""As the last release names it; this one has it in `tests.programs.chaos.processes`."""


@dataclass(frozen=True, slots=True)
class Release:
    """A checkout of an earlier release, and an interpreter that has what it needs."""

    name: str
    folder: Path
    python: Path
    clients = "tests.chaos.clients"
    """The module of its clients, as the last release names it."""

    @property
    def environment(self) -> dict[str, str]:
        """In which its code is found."""
        path = os.pathsep.join((f"{self.folder}/src", str(self.folder)))
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    async def start_worker(
        self, arguments: Sequence[str], environment: Mapping[str, str], group: ProcessGroup
    ) -> EarlierWorker:
        """As `Nursery.start`."""
        process = await group.spawn(
            *(str(self.python), "-u", "-c", _WORK, *arguments),
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=2**20,
        )
        return EarlierWorker(process)


class EarlierWorker:
    """As `nursery.ForkedWorker`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.wait, self.terminate, self.kill = process.wait, process.terminate, process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def lines(self) -> AsyncIterator[bytes]:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield line


def check_out(folder: Path, *, own_environment: bool) -> Release:
    """The last release, in `folder`. Raises CalledProcessError where its history is not here.

    With an environment of its own it has the versions that it was released with, which takes a
    minute or two to install; otherwise those that are installed now.
    """
    clone = ["git", "clone", "--quiet", str(ROOT), str(folder)]
    subprocess.run(clone, check=True, capture_output=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", REVISION], check=True)
    python = Path(sys.executable)
    if own_environment:
        subprocess.run(["make", "-C", str(folder), ".venv/.set-up"], check=True)
        python = folder / ".venv" / "bin" / "python"
    return Release(LAST_RELEASE, folder, python)
