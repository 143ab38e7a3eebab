"""Starts worker processes as forks of one that has imported all they need.

Workers die every second or two in a run, and to import torch takes longer than to live. Each is a
process of its own all the same: it opens its connections, loads its model and starts its threads
itself, and nothing is shared that it writes to.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from tests.support.paths import ROOT

_MODULES = [
    "tests.programs.chaos.processes.chaotic_worker",
    "promptq.worker.engine.runner.model_runner",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.tokenization_auto",
]
_THREADS = {"OMP_NUM_THREADS": "1"}  # read when torch is imported


class Nursery:
    """The process that is forked, by the first that asks; it ends with this process."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_MODULES)
        before = {name: os.environ.get(name) for name in _THREADS}
        os.environ.update(_THREADS)
        try:
            forkserver.ensure_running()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def warm_up(self) -> None:
        """Wait until it has imported everything, which the first start would do otherwise."""
        process = self._context.Process(target=int, daemon=True)
        process.start()
        process.join()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], group: int
    ) -> ForkedWorker:
        """A worker with these arguments, in the process group `group`."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_work, args=(list(arguments), dict(environment), group, theirs), daemon=True
        )
        process.start()
        theirs.close()
        return ForkedWorker(process, ours)


class ForkedWorker:
    """One of them, as asyncio's own processes are used."""

    def __init__(
        self, process: multiprocessing.context.ForkServerProcess, output: Connection
    ) -> None:
        self._process = process
        self._output = output
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; -n if signal n ended it."""
        return self._process.exitcode

    async def wait(self) -> int:
        ended = asyncio.get_running_loop().create_future()
        loop, sentinel = asyncio.get_running_loop(), self._process.sentinel
        loop.add_reader(sentinel, lambda: ended.done() or ended.set_result(None))
        try:
            await ended
        finally:
            loop.remove_reader(sentinel)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    async def lines(self) -> AsyncIterator[bytes]:
        """What it writes, until it ends; its output is closed then."""
        reader = asyncio.StreamReader(limit=2**20)
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(os.dup(self._output.fileno()), "rb", buffering=0)
        self._output.close()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            async for line in reader:
                yield line
        finally:
            transport.close()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _work(
    arguments: list[str], environment: dict[str, str], group: int, output: Connection
) -> None:
    """What a fork does: become the worker's command."""
    os.setpgid(0, group)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.update(environment)
    sys.argv = ["promptq worker", *arguments]
    os.chdir(ROOT)
    from tests.programs.chaos.processes import chaotic_worker

    chaotic_worker.main()
