"""llama.cpp's server in bf16 or one of its formats, flash attention off, streaming over HTTP."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from benchmarks.lib.gguf_file import gguf_file
from benchmarks.lib.serving import free_port, serve
from benchmarks.lib.streaming import Stream, http_events
from benchmarks.table.jobs import Job, Outcome, Request, main


def command(peer: Path, model: Path, port: int, slots: int, context: int) -> list[str]:
    """Returns the command that starts the server. `context` is for each slot; the server divides
    its whole context evenly."""
    return [
        *(str(peer / "bin" / "llama-server"), "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", str(slots), "--ctx-size", str(slots * context)),
        *("--threads", str(os.cpu_count()), "--threads-batch", str(os.cpu_count())),
        *("--flash-attn", "off", "--cache-type-k", "bf16", "--cache-type-v", "bf16"),
        *("--no-webui", "--log-verbosity", "1"),
    ]


def stream_from(port: int) -> Stream:
    async def stream(request: Request) -> AsyncIterator[int]:
        body = {
            "prompt": request.prompt,
            "n_predict": request.num_output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
        }
        told = 0
        async for event in http_events(port, "/completion", body):
            if event["tokens"]:
                told += len(event["tokens"])
                yield len(event["tokens"])
            elif event["stop"] and event["tokens_predicted"] > told:
                yield event["tokens_predicted"] - told

    return stream


def run(job: Job, done: Callable[[str, Outcome], None]) -> None:
    peer = Path(job.peers) / "llama"
    model = gguf_file(Path(job.model), peer / "gguf-py", job.format or "BF16")
    longest = max(
        len(request.prompt) + request.num_output
        for workload in job.workloads
        for request in workload.requests
    )
    port = free_port()
    words = command(peer, model, port, job.max_num_seqs, longest + 16)
    serve(job, done, words, port, stream_from(port))


if __name__ == "__main__":
    main(run)
