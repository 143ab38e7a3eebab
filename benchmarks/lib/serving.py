"""Starts the server of a table row, sends it the workloads over HTTP, and ends the server."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from benchmarks.lib.memory import peak_bytes, reset_peak, tree
from benchmarks.lib.streaming import Stream, drive, wait_until_healthy
from benchmarks.table.jobs import Job, Outcome


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def serve(
    job: Job, done: Callable[[str, Outcome], None], command: list[str], port: int, stream: Stream
) -> None:
    """Run all workloads against the server that `command` starts, and pass each outcome to `done`.
    The peak memory is that of the server alone."""
    with running_server(command) as server:
        asyncio.run(_drive_all(job, done, server, port, stream))


@contextmanager
def running_server(
    command: list[str], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` until the end of the context. Yields the process."""
    server = subprocess.Popen(command, env=environment)
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


async def _drive_all(
    job: Job,
    done: Callable[[str, Outcome], None],
    server: subprocess.Popen[bytes],
    port: int,
    stream: Stream,
) -> None:
    await wait_until_healthy(port, lambda: server.poll() is None)
    for workload in job.workloads:
        reset_peak(tree(server.pid))
        outcome = await drive(workload, stream)
        outcome.peak_bytes = peak_bytes(tree(server.pid))
        done(workload.name, outcome)
