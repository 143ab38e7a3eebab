"""A disk of its own for a server, so small that a test can fill it."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from tests.support.processes import read_line, start

_MOUNT = 'mount -t tmpfs -o size=1m tmpfs "$0" && echo mounted && exec cat'
_PROGRAMS = ("unshare", "nsenter", "mount")


class SmallDisk:
    """A megabyte of tmpfs at `folder`, for those that are run `within` and for nobody else.

    It is in a mount namespace, which lives as long as the process that made it. The test is skipped
    where mounting is not permitted.
    """

    def __init__(self, folder: Path) -> None:
        if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
            pytest.skip(f"{' and '.join(missing)} not installed; no disk is filled")
        folder.mkdir()
        self.folder = folder
        self._holder = start(
            *["unshare", "--mount", "sh", "-c", _MOUNT, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if read_line(self._holder) != "mounted\n":
            _, said = self._holder.communicate()
            pytest.skip(f"mounting is not permitted here, so no disk is filled: {said.strip()}")
        self.within = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--"]
        self._filler = Path(f"/proc/{self._holder.pid}/root{folder}/filler")

    def fill(self) -> None:
        with suppress(OSError), self._filler.open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))

    def make_room(self) -> None:
        self._filler.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.communicate()
