"""vLLM's OpenAI server, streaming over HTTP."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable

from benchmarks.driving.serving import free_port, serve
from benchmarks.driving.streaming import http_events
from benchmarks.suite.jobs import Job, Outcome, Request, main


def run(job: Job, done: Callable[[str, Outcome], None]) -> None:
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", job.model),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "bench"),
        *("--dtype", job.torch_dtype, "--max-model-len", str(job.max_model_len)),
        *("--max-num-seqs", str(job.max_num_seqs)),
        *("--kv-cache-memory-bytes", str(job.kv_cache_bytes)),
        *("--disable-log-stats", "--disable-uvicorn-access-log"),
    ]

    async def stream(request: Request) -> AsyncIterator[int]:
        body = {
            "model": "bench",
            "prompt": request.prompt,
            "max_tokens": request.num_output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
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

    serve(job, done, command, port, stream)


if __name__ == "__main__":
    main(run)
