"""Servers to connect to."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from tests.ports import free_port
from tests.roles import acl_file_for_tests


@dataclass
class Server:
    """Somewhere to connect to: `url` is empty for fakeredis, which lives in this process.

    Both take a role; without one the client is for a `RequestQueue` and for the test, see `roles`.
    """

    url: str
    connect: Callable[..., Any]
    connect_async: Callable[..., Any]


def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a redis-server that ends when the generator goes on; skips where there is none.

    It has the roles, and its default user may do anything.
    """
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed; the embedded server and fakeredis are tested")
    port = free_port()
    folder = tmp_path_factory.mktemp("redis-server")
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--dir", str(folder), "--aclfile", str(acl_file_for_tests(folder))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with redis.Redis(port=port) as client:
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert process.poll() is None, "redis-server did not start"
                time.sleep(0.01)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait()
