"""vLLM's OpenAI server, streaming over HTTP."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from benchmarks.lib.serving import free_port, serve
from benchmarks.lib.streaming import Stream, http_events
from benchmarks.lib.vllm_command import MODEL, vllm_command
from benchmarks.table.jobs import Job, Outcome, Request, main


def run(job: Job, done: Callable[[str, Outcome], None]) -> None:
    port = free_port()
    serve(job, done, vllm_command(sys.executable, job, port), port, streams_of(port))


def streams_of(port: int, **fields: Any) -> Stream:
    """Returns a function that sends a request to the server at `port`, with further `fields`, and
    yields the number of tokens in each event."""

    async def stream(request: Request) -> AsyncIterator[int]:
        body = {
            "model": MODEL,
            "prompt": request.prompt,
            "max_tokens": request.num_output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        told = 0
        async for event in http_events(port, "/v1/completions", body):
            if event["choices"]:
                told += 1
                yield 1
            elif event.get("usage"):  # events that held several tokens count as they should
                missing = event["usage"]["completion_tokens"] - told
                if missing:
                    yield missing

    return stream


if __name__ == "__main__":
    main(run)
