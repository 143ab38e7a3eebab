"""Lists all benchmarks, and runs one of them: `python -m benchmarks NAME`."""

from __future__ import annotations

import sys

from tests.support.program_list import Program, run

_PINNED = {"OMP_WAIT_POLICY": "passive", "OMP_PLACES": "cores", "OMP_PROC_BIND": "close"}

PROGRAMS = {
    "table": Program("benchmarks.table"),
    "peers": Program("benchmarks.lib.peers"),
    "pairs": Program("benchmarks.pairs"),
    "pairs-at-server": Program("benchmarks.engine.pairs_at_server"),
    "cancel": Program("benchmarks.engine.cancel"),
    "sharing": Program("benchmarks.engine.sharing"),
    "drafting": Program("benchmarks.engine.drafting"),
    "formats": Program("benchmarks.engine.formats"),
    "quality": Program("benchmarks.engine.quality"),
    "lock": Program("benchmarks.engine.interpreter_lock", environment=_PINNED),
    "gpu": Program("benchmarks.gpu"),
    "gpu-steps": Program("benchmarks.gpu.step_model", environment={"TRITON_INTERPRET": "1"}),
    "gateway": Program("benchmarks.gateway"),
    "batch": Program("benchmarks.batch"),
    "long-queue": Program("benchmarks.queue.long_queue"),
    "idle": Program("benchmarks.queue.idle"),
    "script-time": Program("benchmarks.queue.script_time"),
    "memory": Program("benchmarks.queue.redis_memory"),
    "swap": Program("benchmarks.model_swap"),
}

if __name__ == "__main__":
    sys.exit(run("python -m benchmarks", PROGRAMS))
