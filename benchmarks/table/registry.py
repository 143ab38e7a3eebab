"""The rows of the table: the process that measures each, its environment, and its workloads."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

_AT_ONCE = frozenset({"burst", "solo", "shared-prefix"})
_STREAMED = _AT_ONCE | {"poisson"}
_FORMATS = frozenset({"burst", "solo", "prompt"})


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    title: str
    module: str
    """The row's module in `benchmarks.table.rows`."""
    workloads: frozenset[str]
    peer: str | None = None
    """The peer's folder that the row needs."""
    is_own: bool = False
    runs_in_peer: bool = False
    """Whether its process runs in vLLM's environment."""
    format: str = ""
    """The format of the weights, for rows that compare formats. Such rows draft nothing."""

    def missing(self, peers: Path) -> str | None:
        """Returns why the row cannot run; None if it can."""
        if self.peer is None:
            return None
        reason = peers / f"{self.peer}.missing"
        if reason.exists():
            return reason.read_text().strip()
        return None if (peers / self.peer).exists() else "not built: python -m benchmarks peers"

    def interpreter(self, peers: Path) -> Path:
        """Returns the Python interpreter of the row's process."""
        if self.runs_in_peer:
            return vllm_python(peers)
        return Path(sys.executable)

    def variables(self, peers: Path) -> dict[str, str]:
        """Returns the environment variables of the row's process."""
        return vllm_variables(peers) if self.runs_in_peer else {}


def vllm_python(peers: Path) -> Path:
    return peers / "vllm" / "bin" / "python"


def vllm_variables(peers: Path) -> dict[str, str]:
    """Returns variables that make vLLM fastest on a CPU: all cores, tcmalloc, Intel's OpenMP."""
    libraries = [
        *sorted((peers / "tcmalloc").rglob("libtcmalloc_minimal.so.*"))[:1],
        peers / "vllm" / "lib" / "libiomp5.so",
    ]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "LD_PRELOAD": ":".join(str(library.resolve()) for library in libraries if library.exists()),
        "VLLM_CACHE_ROOT": str(peers / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


ROWS = {
    row.name: row
    for row in (
        Row("engine", "engine alone", "engine", _STREAMED, is_own=True),
        Row("redis", "whole path through Redis", "whole_path", _STREAMED, is_own=True),
        Row("vllm-offline", "vLLM offline", "vllm_offline", _AT_ONCE, "vllm", runs_in_peer=True),
        Row("vllm-server", "vLLM server", "vllm_server", _STREAMED, "vllm", runs_in_peer=True),
        Row("llama-server", "llama.cpp server", "llama_server", _AT_ONCE, "llama"),
        Row("engine-bf16", "bf16", "engine", _FORMATS, is_own=True, format="bf16"),
        Row("engine-int8", "int8, KV too", "engine", _FORMATS, is_own=True, format="int8"),
        Row("engine-int4", "int4", "engine", _FORMATS, is_own=True, format="int4"),
        Row("llama-bf16", "llama.cpp BF16", "llama_server", _FORMATS, "llama", format="BF16"),
        Row("llama-q8_0", "llama.cpp Q8_0", "llama_server", _FORMATS, "llama", format="Q8_0"),
        Row("llama-q4_0", "llama.cpp Q4_0", "llama_server", _FORMATS, "llama", format="Q4_0"),
        Row("continuous", "transformers continuous batching", "continuous", _AT_ONCE),
        Row("static", "transformers generate, static", "static", _AT_ONCE),
        Row("queue", "queue alone", "queue_alone", frozenset({"queue"}), is_own=True),
        Row("bullmq", "BullMQ", "bullmq", frozenset({"queue"}), "bullmq"),
    )
}
