"""Waits until a server that broke off generates again, and checks that it has the same model."""

from __future__ import annotations

import asyncio
import random
import time

from promptq.shared.errors import ConfigurationError
from promptq.shared.runtime.logs import get_logger
from promptq.worker.upstream.dialects.dialect import Dialect, ServerDescription
from promptq.worker.upstream.dialects.transport import (
    OverloadedError,
    RefusedError,
    Server,
    ServerFaultError,
    malformed_as_fault,
)
from promptq.worker.upstream.probing import describe
from promptq.worker.upstream.server_process import ServerProcess

_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 5.0
_STEADY_SECONDS = 10.0
"""If a server breaks streams again within this time, pauses between its calls keep growing."""


class ServerRecovery:
    """Calls a server, with growing pauses, until the server generates a token again."""

    def __init__(
        self,
        dialect: Dialect,
        model: str,
        max_model_len: int,
        process: ServerProcess | None,
    ) -> None:
        """The server must come back with this `model` and at least `max_model_len` tokens."""
        self._dialect, self._model, self._max_model_len = dialect, model, max_model_len
        self._process = process
        self._well_since = time.monotonic()
        self._pause = 0.0  # before the next call of the server
        self._reported = ""  # why it was not well at the last call

    async def wait_until_well(self, server: Server, seconds: float) -> ServerDescription:
        """Wait for `seconds`, then until the server generates a token. Returns the description.
        Raises ConfigurationError if another server answers, or if the server cannot come back."""
        log = get_logger(server=server.url)
        if time.monotonic() - self._well_since > _STEADY_SECONDS:
            self._pause = 0.0
        await asyncio.sleep(seconds + self._spread())
        while True:
            self._pause = min(max(2 * self._pause, _FIRST_RETRY_SECONDS), _LAST_RETRY_SECONDS)
            if self._process is not None:
                self._process.check()
            try:
                with malformed_as_fault():
                    now = await describe(self._dialect, server)
                break
            except (ServerFaultError, OverloadedError, RefusedError) as error:
                if str(error) != self._reported:
                    self._reported = str(error)
                    log.warning("the inference server does not work yet", error=self._reported)
            await asyncio.sleep(self._spread())
        if now.model != self._model:
            change = f"serves {now.model!r:.200} now, and served {self._model!r:.200} before"
            raise ConfigurationError(f"--upstream: {server.url} {change}")
        if now.max_model_len < self._max_model_len:  # it would refuse what is accepted here
            change = f"takes {now.max_model_len} tokens now, and took {self._max_model_len} before"
            raise ConfigurationError(f"--upstream: {server.url} {change}")
        log.info("the inference server works again", software=now.software)
        self._well_since = time.monotonic()
        return now

    def _spread(self) -> float:
        """Returns a random pause, so that several workers do not call at the same time."""
        return self._pause * random.uniform(0.5, 1.0)  # noqa: S311 # spreads retries
