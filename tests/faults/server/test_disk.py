"""The server's disk is full: nothing is lost, and with room again all goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from promptq import Client
from promptq.shared.errors import RedisSideError
from promptq.shared.queue.request_queue import RequestQueue
from tests.faults.server.small_disk import SmallDisk
from tests.support.model_free_worker import text_of
from tests.support.processes import started
from tests.support.requests import check_log
from tests.support.servers import OwnServer
from tests.support.waiting import until

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
