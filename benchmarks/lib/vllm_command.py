"""The command that starts vLLM's server, alone and behind a worker."""

from __future__ import annotations

from benchmarks.table.jobs import Job

MODEL = "bench"
"""The name by which vLLM serves its model."""


def vllm_command(python: str, job: Job, port: int, *flags: str) -> list[str]:
    """Returns the server's command. `python` is the interpreter of vLLM's environment."""
    return [
        *(python, "-m", "vllm.entrypoints.cli.main", "serve", job.model),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL),
        *("--dtype", job.torch_dtype, "--max-model-len", str(job.max_model_len)),
        *("--max-num-seqs", str(job.max_num_seqs)),
        *("--kv-cache-memory-bytes", str(job.kv_cache_bytes)),
        *("--disable-log-stats", "--disable-uvicorn-access-log", *flags),
    ]
