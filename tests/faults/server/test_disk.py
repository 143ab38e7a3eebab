"""The server's disk is full: nothing is lost, and with room again all goes on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from promptq import Client
from promptq.shared.errors import RedisSideError
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.model_free import text_of
from tests.support.processes import read_line, start, started
from tests.support.requests import check_log
from tests.support.servers import OwnServer
from tests.support.waiting import until

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


FAULTY = "tests.faults.worker.faulty_worker"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with SmallDisk(tmp_path / "disk") as disk:
        yield disk


def server_on(disk: SmallDisk, appendfsync: str) -> OwnServer:
    options = ["--dir", str(disk.folder), "--appendfsync", appendfsync]
    return OwnServer(disk.folder.parent / "server", *options, within=disk.within)


def test_a_full_disk_refuses_writes_until_there_is_room(disk: SmallDisk, tmp_path: Path) -> None:
    """With `appendfsync everysec`: the worker tries on, a producer is told, a stream waits."""
    with (
        server_on(disk, "everysec") as server,
        started(tmp_path, server.url, "--lease-ms", "60000", module=FAULTY) as worker,
        Client(server.url) as client,
        server.client() as own,
    ):
        request_id = client.enqueue("a", seed=1, max_tokens=500)
        stream = client.stream(request_id)
        text = "".join(next(stream).text for _ in range(20))
        disk.fill()
        until(lambda: worker.logged("Redis does not accept a call, trying again"))
        (told,) = worker.logged("Redis does not accept a call, trying again")
        assert "MISCONF" in told["error"]
        assert "No space left on device" in told["error"]
        with pytest.raises(RedisSideError, match="MISCONF"):
            client.enqueue("a")
        disk.make_room()
        text += "".join(event.text for event in stream)
        assert text == text_of(1, 500)
        assert client.generate("a", seed=2, max_tokens=5).text == text_of(2, 5)
        until(lambda: own.info("persistence")["aof_buffer_length"] == 0)
        server.kill()
        server.start()  # with what it wrote before, at and after the end of its disk
        log = check_log(RequestQueue(own), request_id, text)
        assert {event["attempt"] for event in log} == {1}


def test_a_server_that_a_full_disk_ended_goes_on_where_there_is_room(
    disk: SmallDisk, tmp_path: Path
) -> None:
    """With `appendfsync always` it exits, for it may not answer for what it could not write."""
    with (
        server_on(disk, "always") as server,
        started(tmp_path, server.url, "--lease-ms", "60000", module=FAULTY),
        Client(server.url) as client,
        server.client() as own,
    ):
        request_id = client.enqueue("a", seed=1, max_tokens=500)
        stream = client.stream(request_id)
        text = "".join(next(stream).text for _ in range(20))
        disk.fill()
        assert server.wait() == 1
        disk.make_room()
        server.start()
        text += "".join(event.text for event in stream)
        assert text == text_of(1, 500)
        log = check_log(RequestQueue(own), request_id, text)
        assert {event["attempt"] for event in log} == {1}
