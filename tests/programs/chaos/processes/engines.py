"""Inference servers behind the workers of a run: killed, made to fail, and started again."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import httpx2

from promptq.worker.shipped import MODEL_DIR
from tests.programs.chaos.audit.auditor import Violation
from tests.programs.chaos.audit.records import Expected
from tests.programs.chaos.requests import HERO, MOST_UPSTREAM_TOKENS, UPSTREAM_REQUESTS
from tests.programs.chaos.schedule import Fault
from tests.programs.engines.real_servers import RealServer
from tests.programs.stand_in_server.starting import StandIn, save_byte_model, stand_in_server
from tests.support.servers import free_port
from tests.worker.text.grammars.structured import assert_valid, prepare, run, served
from tests.worker.upstream.test_watched_streams import built, close, masked

_IDLE_SECONDS = 30.0
_SERVING_SECONDS = 15.0
"""The longest time that a real server computes before it is killed. Workers probe it first."""
_REAL_START_SECONDS = "3600"
"""The longest wait of a worker for a real server, which may be killed while it is probed."""


class KillableStandIn:
    """A stand-in (a server without a model that answers like vLLM) that a test can kill and start
    again."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._context = ExitStack()
        self._running: StandIn | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:  # a run that ends meanwhile kills it afterwards
            context = stand_in_server("vllm", *self._options, port=self._port)
            self._running = self._context.enter_context(context)

    def kill(self) -> None:
        with self._lock:
            self._context.close()

    def num_running(self) -> int:
        assert self._running is not None
        return int(self._running.told()["running"])

    def fail(self, fault: str) -> None:
        assert self._running is not None
        self._running.fail(fault)


def _num_running(server: KillableStandIn | RealServer) -> int:
    """Returns the number of running requests; 0 for a server that has ended by itself."""
    try:
        return server.num_running()
    except httpx2.TransportError:
        return 0


class Engines:
    """Two stand-ins, only one of which takes grammars; or one real server of the given kind."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._is_real = kind != "stand-in"
        self._engine = kind if self._is_real else "vllm"
        self._model = MODEL_DIR if self._is_real else save_byte_model(folder / "model")
        self.servers: list[KillableStandIn | RealServer]
        if self._is_real:
            self.servers = [RealServer(kind, folder)]
        else:
            with_plugin = KillableStandIn("--grammars", str(self._model), "--plugin")
            self.servers = [KillableStandIn(), with_plugin]
        self._lock = asyncio.Lock()

    def options(self, number: int) -> list[str]:
        """Returns the options of the worker with this number."""
        url = self.servers[number % len(self._servers)].url
        where = ["--engine", self._engine, "--upstream", url]
        # A real server may be silent for long on a small machine, and is never frozen.
        wait = ["--redis-wait", _REAL_START_SECONDS] if self._is_real else ["--stuck-seconds", "3"]
        return [*where, *wait, "--model", str(self._model), "--dtype", "float32"]

    def references(self) -> dict[str, Expected]:
        """Returns the answer to each request that `make_request` makes, by its template. For a real
        server, the answers are those of the native engine. Checks that answers to schemas obey the
        schemas."""
        fields = {"temperature": 0.0, "max_tokens": MOST_UPSTREAM_TOKENS + 1}
        here = served() if self._is_real else built("vllm", self.servers[0].url, self._model)
        prepared = [prepare(here, **each, **fields) for each in UPSTREAM_REQUESTS.values()]
        if self._is_real:
            answers = [output.token_ids for output in run(here, *prepared)]
        else:
            answers = [masked(each)[0] for each in prepared]
            close(here)
        found = {}
        for name, tokens in zip(UPSTREAM_REQUESTS, answers, strict=True):
            texts = [here.tokenizer.decode(tokens[:count]) for count in range(len(tokens) + 1)]
            if len(UPSTREAM_REQUESTS[name]) > 1 and len(tokens) <= MOST_UPSTREAM_TOKENS:
                value = json.loads(texts[-1])
                assert_valid(value.get("arguments", value), HERO)
            for count in range(1, MOST_UPSTREAM_TOKENS + 1):
                reason = "length" if count < len(tokens) else "stop" if count > len(tokens) else ""
                text = texts[min(count, len(tokens))]
                found[f"{name}, {count} tokens"] = Expected(tokens[:count], text, reason)
        return found

    async def start(self) -> None:
        for server in self.servers:
            await asyncio.to_thread(server.start)

    async def hurt(self, fault: Fault, rng: random.Random) -> bool:
        """Inflict a fault on one server at a time. Returns whether the fault is possible."""
        if self._is_real and (fault is Fault.ENGINE_FAULT or self._lock.locked()):
            return False  # it still starts, and faults would queue up for longer than the run
        async with self._lock:
            server = rng.choice(self.servers)
            if fault is Fault.ENGINE_KILL:
                if isinstance(server, RealServer) and not server.has_ended:
                    if not await asyncio.to_thread(_num_running, server):
                        return False
                    await asyncio.sleep(rng.uniform(0.0, _SERVING_SECONDS))
                server.kill()
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                await asyncio.to_thread(server.start)
            elif isinstance(server, KillableStandIn):
                server.fail(rng.choice(("break", "abort", "end", "freeze", "overload")))
                await asyncio.sleep(rng.uniform(0.1, 4.0))
                server.fail("")
            return True

    async def busy(self) -> AsyncIterator[Violation]:
        """Yields a violation for each server that still computes something a while after the last
        request."""
        for server in self.servers:
            deadline = time.monotonic() + _IDLE_SECONDS
            while (left := _num_running(server)) and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            if left:
                yield Violation("left at a server", "", f"{left} still run at {server.url}")

    def kill(self) -> None:
        for server in self.servers:
            server.kill()
