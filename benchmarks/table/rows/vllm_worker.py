"""The whole path with vLLM's server behind the worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.lib.serving import free_port, running_server
from benchmarks.lib.streaming import wait_until_healthy
from benchmarks.lib.vllm_command import vllm_command
from benchmarks.table.jobs import Job, Outcome, main
from benchmarks.table.registry import vllm_python, vllm_variables
from benchmarks.table.rows.whole_path import run_worker
from promptq.worker.upstream.server_process import server_environment


def run(job: Job, done: Callable[[str, Outcome], None]) -> None:
    with server_for_workers(job) as port:
        run_worker(job, done, *worker_flags(job, port))


@contextmanager
def server_for_workers(job: Job) -> Iterator[int]:
    """Runs vLLM's server with the options that a worker needs. Yields its port."""
    peers, port = Path(job.peers), free_port()
    python = vllm_python(peers)
    grammars = ("--structured-outputs-config", '{"backend": "guidance"}')
    command = vllm_command(str(python), job, port, "--enable-scale-out", *grammars)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**server_environment(), **vllm_variables(peers), "PATH": path}
    with running_server(command, environment) as server:
        asyncio.run(wait_until_healthy(port, lambda: server.poll() is None))
        yield port


def worker_flags(job: Job, port: int) -> tuple[str, ...]:
    return (
        *("--engine", "vllm", "--upstream", f"http://127.0.0.1:{port}"),
        *("--model", job.model, "--max-num-seqs", str(job.max_num_seqs)),
    )


if __name__ == "__main__":
    main(run)
