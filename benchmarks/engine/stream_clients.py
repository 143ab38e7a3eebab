"""Measures the CPU time of several HTTP clients that read a server's streams.

A server in another process sends one token to each of 32 streams every 20 ms, as a decoding batch
does. The clients take turns. This measures the process's CPU time for each event, JSON included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable

import httpx2

from benchmarks.lib.streaming import http_events
from promptq.worker.upstream.dialects.transport import Server, read_json

_STREAMS, _EVENTS, _STEP_SECONDS = 32, 200, 0.02
_EVENT = {
    "request_id": "generate-tokens-0123456789abcdef",
    "choices": [{"index": 0, "logprobs": None, "finish_reason": None, "token_ids": [17]}],
}
_CHUNK = b"data: " + json.dumps(_EVENT).encode() + b"\n\n"


def serve(listener: socket.socket) -> None:
    """Runs the server in its process."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        started = time.monotonic()
        for number in range(_EVENTS):
            await asyncio.sleep(max(0.0, started + number * _STEP_SECONDS - time.monotonic()))
            writer.write(b"%x\r\n%b\r\n" % (len(_CHUNK), _CHUNK))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, sock=listener)
        await server.serve_forever()

    asyncio.run(run())


async def aiohttp(port: int) -> AsyncIterator[None]:
    server = Server(f"http://127.0.0.1:{port}")
    try:
        async with server.stream("/", {}) as events:
            async for data in events:
                read_json(data)
                yield
    finally:
        await server.close()


async def httpx(port: int) -> AsyncIterator[None]:
    async with (
        httpx2.AsyncClient(timeout=60) as client,
        client.stream("POST", f"http://127.0.0.1:{port}/", json={}) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                read_json(line[6:])
                yield


async def sockets(port: int) -> AsyncIterator[None]:
    async for _ in http_events(port, "/", {}):
        yield


async def cost(client: Callable[[int], AsyncIterator[None]], port: int) -> float:
    """Returns the CPU seconds of this process for each event."""

    async def read() -> int:
        return len([it async for it in client(port)])

    started = time.process_time()
    counts = await asyncio.gather(*(read() for _ in range(_STREAMS)))
    assert counts == [_EVENTS] * _STREAMS
    return (time.process_time() - started) / (_STREAMS * _EVENTS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks stream-clients", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=_STREAMS)
    port = listener.getsockname()[1]
    server = multiprocessing.Process(target=serve, args=(listener,), daemon=True)
    server.start()
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for client in (aiohttp, httpx, sockets):
            seconds = asyncio.run(cost(client, port))
            found.setdefault(client.__name__, []).append(seconds * 1e6)
    for name, times in found.items():
        span = f"{min(times):.0f} to {max(times):.0f}"
        print(f"{name}: {statistics.median(times):.0f} µs an event ({span})")
    server.kill()


if __name__ == "__main__":
    main()
