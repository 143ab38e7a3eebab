"""Measures the delay that the gateway adds to a token, compared with a bare relay.

Workers on the model-free engine make tokens at a fixed rate. A process that subscribes to all
channels records when Redis publishes each event. Another process, with bare HTTP clients, records
when the event's bytes arrive. The recorded times are evaluated after the streams. The difference is
the delay of the gateway and a socket. Each load has several workers, so that their steps do not end
at the same time. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import hiredis
import redis.asyncio
import uvloop
from rich.table import Table

from benchmarks.lib.children import child
from benchmarks.lib.memory import peak_bytes
from benchmarks.table.statistics import percentile
from promptq import Client
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.commands.screens.terminal import console_for_list
from promptq.producer.gateway.server import allow_many_connections
from promptq.shared.protocol.claims import ModelIdentity
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.runtime.logs import configure_logs
from promptq.shared.server.embedded import EmbeddedServer
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.model_free import END_TOKEN_ID, ModelFreeRunner, ModelFreeStep
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.serve.build import Served
from promptq.worker.serve.worker import Worker
from promptq.worker.text.tokenizer import ByteTokenizer

Noted = list[tuple[float, bytes]]
"""Pairs of the `time.monotonic()` at which bytes came, and the bytes."""

Times = dict[tuple[str, int], float]
"""The time of each event, by request and by the number of its tokens up to this event."""

_BLOCK_SIZE = 16
_EVENT_ID = re.compile(rb"^id: (\S+)/(\d+)-\d+e?$", re.MULTILINE)
_FIRST_SHARE = 0.2
"""The share of tokens that come while streams still begin. They are not counted."""


@dataclass(frozen=True, slots=True)
class Load:
    num_streams: int
    num_workers: int
    tokens_per_second: float
    """The rate of one stream."""
    seconds: float

    @property
    def num_tokens(self) -> int:
        return int(self.tokens_per_second * self.seconds)


LOADS = (Load(200, 4, 20.0, 15.0), Load(2000, 8, 2.0, 30.0))
GATEWAY = ("promptq.producer.cli", "gateway", "--port", "0", "--redis")
RELAY = ("benchmarks.gateway.relay",)
"""Command lines of processes that carry the streams. The server's URL follows."""

ROWS = (
    ("gateway", [GATEWAY], LOADS[0]),
    ("two gateways", [GATEWAY, GATEWAY], LOADS[0]),
    ("bare relay", [RELAY], LOADS[0]),
    ("gateway", [GATEWAY], LOADS[1]),
)


_PLACES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "largest": 1.0}


class PacedRunner(ModelFreeRunner):
    """A model-free runner whose steps each take `step_seconds`."""

    step_seconds = 0.0

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        time.sleep(self.step_seconds)
        return super().collect(launched)


def serve(url: str, load: Load) -> None:
    """Run one of the load's workers until the process is ended."""
    configure_logs("warning", "auto")  # nobody reads its output
    slots = -(-load.num_streams // load.num_workers)
    num_blocks = slots * (load.num_tokens // _BLOCK_SIZE + 2)
    runner = PacedRunner(num_blocks, _BLOCK_SIZE, num_blocks * _BLOCK_SIZE)
    runner.step_seconds = 1 / load.tokens_per_second
    engine = LLMEngine(runner, max_num_seqs=slots, max_num_batched_tokens=max(512, slots))
    ends = frozenset({END_TOKEN_ID})
    identity = ModelIdentity("model-free", "model-free")
    served = Served(engine, ByteTokenizer(), identity, ends, "none", "none")

    async def run() -> None:
        async with redis.asyncio.Redis.from_url(url) as client:
            worker = Worker(WorkerSettings(prefetch_depth=0), served, client)
            await worker.start()
            print("ready", flush=True)
            await worker.serve(asyncio.Event())

    asyncio.run(run())


def observe(url: str, file: Path) -> None:
    """Record all messages of the channels until the process is ended, and write them to `file`."""
    noted: Noted = []
    host = urlsplit(url)

    class Subscriber(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            commands = f"AUTH {host.password}\r\nPSUBSCRIBE promptq:*:events:*\r\n"
            cast(asyncio.Transport, transport).write(commands.encode())

        def data_received(self, data: bytes) -> None:
            noted.append((time.monotonic(), data))

    async def run() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, over.set)
        await loop.create_connection(Subscriber, host.hostname, host.port)
        print("ready", flush=True)
        await over.wait()

    uvloop.run(run())
    file.write_text(json.dumps([(at, data.decode("latin-1")) for at, data in noted]))


class HttpClient(asyncio.Protocol):
    """An HTTP client of one stream. `noted` has the bytes received so far, with their times."""

    def __init__(self, secret: str, payload: bytes, finished: asyncio.Semaphore) -> None:
        self.noted: Noted = []
        self._secret = secret.encode()
        self._payload = payload
        self._finished = finished

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
            % (self._secret, len(self._payload), self._payload)
        )

    def data_received(self, data: bytes) -> None:
        self.noted.append((time.monotonic(), data))

    def connection_lost(self, _: Exception | None) -> None:
        self._finished.release()


async def ask(ports: Sequence[int], share: Load, secret: str) -> list[HttpClient]:
    """Open `share.num_streams` streams at each port, and read all streams to the end. Returns their
    clients. `secret` is an API key."""
    loop, finished = asyncio.get_running_loop(), asyncio.Semaphore(0)
    fields = {"prompt": "Hi", "stream": True, "max_tokens": share.num_tokens}
    payload = json.dumps(fields).encode()
    clients = []
    for port in [port for _ in range(share.num_streams) for port in ports]:
        _, client = await loop.create_connection(
            lambda: HttpClient(secret, payload, finished), "127.0.0.1", port
        )
        clients.append(client)
    for _ in clients:
        await finished.acquire()
    return clients


def read_noted(file: Path) -> Noted:
    """Returns the times and bytes that `observe` has written to `file`."""
    return [(at, data.encode("latin-1")) for at, data in json.loads(file.read_text())]


def published_times(noted: Noted) -> Times:
    """Returns the `time.monotonic()` at which each event was published."""
    times: Times = {}
    reader = hiredis.Reader()
    for at, data in noted:
        reader.feed(data)
        while (message := reader.gets()) is not False:
            if message[0] == b"pmessage":
                event = TokenEvent.model_validate_json(message[3])
                request_id = message[2].rpartition(b":events:")[2].decode()
                times[request_id, event.end] = at
    return times


def arrival_times(clients: list[HttpClient]) -> Times:
    """Returns the `time.monotonic()` at which each event's last byte arrived. Raises RuntimeError
    for an answer that is no stream."""
    times: Times = {}
    for client in clients:
        whole = b"".join(data for _, data in client.noted)
        if b"[DONE]" not in whole:
            raise RuntimeError(f"a stream broke off: {whole[:300]!r} ... {whole[-300:]!r}")
        for at, data in client.noted:  # a frame is one write, and small
            for found in _EVENT_ID.finditer(data.replace(b"\r\n", b"\n")):
                times[found[1].decode(), int(found[2])] = at
    return times


@dataclass(frozen=True, slots=True)
class Measured:
    added: list[float]
    """The seconds that the gateway added to each token."""
    cpu_per_token: float
    """Seconds of CPU time that the gateway used, including the beginnings of streams."""
    peak_bytes: int


def measure(commands: Sequence[Sequence[str]], load: Load) -> Measured:
    """Start the processes of `commands` (gateways or relays), which share the load's streams.
    Returns their delay of each token, CPU time and memory."""
    this, described = "benchmarks.gateway", json.dumps(asdict(load))
    share = replace(load, num_streams=load.num_streams // len(commands))
    with ExitStack() as stack:
        noted = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "noted"
        url = stack.enter_context(EmbeddedServer()).url
        with Client(url) as client:
            secret, _ = client.create_api_key(ApiKey(name="a"))
        for _ in range(load.num_workers):
            stack.enter_context(child(this, "--serve", url, "--load", described))
        carriers = [stack.enter_context(child(*command, url)) for command in commands]
        pids = [pid for pid, _ in carriers]
        ports = [_port_in(said) for _, said in carriers]
        with child(this, "--observe", url, "--file", str(noted)):
            cpu_before = sum(map(_cpu_seconds, pids))
            clients = uvloop.run(ask(ports, share, secret))
            cpu_seconds = sum(map(_cpu_seconds, pids)) - cpu_before
            time.sleep(1)  # the observer may read its last bytes after the clients theirs
            cpu_per_token = cpu_seconds / (load.num_streams * load.num_tokens)
            peak = peak_bytes(pids)
        published = published_times(read_noted(noted))
    first = int(load.num_tokens * _FIRST_SHARE)
    arrived = {key: at for key, at in arrival_times(clients).items() if key[1] > first}
    added = [at - published[key] for key, at in arrived.items()]
    return Measured(added, cpu_per_token, peak)


def _port_in(said: str) -> int:
    return int(said.split("//127.0.0.1:")[1].split(",")[0])


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gateway", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="run for a few seconds, to try the benchmark"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--observe", help=argparse.SUPPRESS)
    parser.add_argument("--load", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, Load(**options.load))
        return
    if options.observe:
        observe(options.observe, options.file)
        return
    allow_many_connections()
    shorter = 5 if options.quick else 1
    table = Table("", "streams", *_PLACES, "CPU, µs a token", "memory, MiB")
    for name, commands, load in ROWS:
        measured = measure(commands, replace(load, seconds=load.seconds / shorter))
        added = [f"{percentile(measured.added, at) * 1000:.2f}" for at in _PLACES.values()]
        used = [f"{measured.cpu_per_token * 1e6:.0f}", f"{measured.peak_bytes / 2**20:.0f}"]
        table.add_row(name, f"{load.num_streams:,}", *added, *used)
    console_for_list().print(
        "From the event's publication in Redis to its bytes at an HTTP client, ms;"
    )
    rate = LOADS[0].num_streams * LOADS[0].tokens_per_second  # that of all loads
    console_for_list().print(f"{rate:,.0f} tokens a second in all, shared by the streams:")
    console_for_list().print(table)


if __name__ == "__main__":
    main()
