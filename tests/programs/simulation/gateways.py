"""`promptq gateway` in a simulated process: the real application and protocol."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import uvicorn

from promptq.producer.gateway.app import create_app
from promptq.producer.http.connection_limits import BoundedProtocol
from promptq.producer.settings.gateway import GatewaySettings
from tests.programs.simulation.loop import Process
from tests.programs.simulation.processes import QUEUE, URL

_DRAIN_SECONDS = 1


class NumberedProtocol(BoundedProtocol):
    """A protocol whose order in uvicorn's set of connections does not depend on its memory
    address."""

    num_made = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        NumberedProtocol.num_made += 1
        self._number = NumberedProtocol.num_made
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class GatewayProgram:
    """A gateway, without its command line and signals. The name of its place is its host in the
    network."""

    def __init__(self, process: Process, _rng: random.Random, *, folder: Path) -> None:
        self.process = process
        self._folder = folder
        self._server: uvicorn.Server | None = None
        self.main = process.start(self._run())

    def drain(self) -> None:
        """Stop as after a first SIGTERM: let open streams end."""
        if self._server is not None:
            self._server.should_exit = True

    async def _run(self) -> None:
        settings = GatewaySettings(
            redis_url=URL,
            queues=(QUEUE,),
            files_dir=self._folder,
            http_log_requests=False,
            http_header_seconds=0.2,
            http_keepalive_seconds=0.5,
        )
        config = uvicorn.Config(
            create_app(settings),
            http=NumberedProtocol,
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            host=self.process.name.partition(".")[0],
            timeout_graceful_shutdown=_DRAIN_SECONDS,
        )
        self._server = uvicorn.Server(config)
        await self._server._serve()


async def _run_in_executor(function: Callable[..., Any], *args: Any, **_options: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, partial(function, *args))


# FastAPI calls functions that are no coroutines in threads, which a world does not have.
anyio.to_thread.run_sync = _run_in_executor  # type: ignore[assignment]
