"""Sends a workload's requests at their times with asyncio, and records when their tokens come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from benchmarks.table.jobs import Outcome, Request, Trace, Workload, now

Stream = Callable[[Request], AsyncIterator[int]]
"""Sends a request and yields the number of tokens of each event."""


async def drive(workload: Workload, stream: Stream) -> Outcome:
    """Run a workload with one task for each request, like independent users."""
    traces = [Trace(0.0) for _ in workload.requests]
    started = now()

    async def follow(request: Request, trace: Trace) -> None:
        await asyncio.sleep(max(0.0, request.at - (now() - started)))
        trace.submitted = now()
        async for num_tokens in stream(request):
            trace.events.append(now())
            trace.num_tokens += num_tokens

    async with asyncio.TaskGroup() as tasks:
        for request, trace in zip(workload.requests, traces, strict=True):
            tasks.create_task(follow(request, trace))
    first = min(trace.submitted for trace in traces)
    return Outcome(max(trace.events[-1] for trace in traces) - first, traces)


async def http_events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yields the server-sent events of one POST, with as little work as possible. Raises
    RuntimeError with the server's message if the server refuses the request."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        writer.write(head.encode() + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(
                f"{status.decode().strip()}: {(await reader.read()).decode()[-500:]}"
            )
        async for line in reader:  # lines that are no event are headers and sizes of chunks
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                yield event
    finally:
        writer.close()


async def wait_until_healthy(port: int, is_alive: Callable[[], bool]) -> None:
    """Waits until GET /health returns 200. Raises RuntimeError if the server ends or is late."""
    deadline = now() + 300
    while now() < deadline:
        if not is_alive():
            raise RuntimeError("the server ended while it started; see the log of the row")
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            healthy = b" 200 " in await reader.readline()
            writer.close()
            if healthy:
                return
        except OSError:
            pass
        await asyncio.sleep(0.2)
    raise RuntimeError("the server was not healthy within 300 s")
