"""Runs one row's process and reads its results."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from benchmarks.table.jobs import Job, Outcome, read_outcomes, write_job
from benchmarks.table.registry import Row

ROOT = Path(__file__).parents[2]
_MOST_SECONDS = 1800.0


def run_row(row: Row, job: Job, log: Path) -> tuple[dict[str, Outcome], str | None]:
    """Returns outcomes by workload, and the failure that ended the process early, if any.

    The process has a separate session, so that all processes that it started end with it.
    """
    peers = Path(job.peers)
    with tempfile.TemporaryDirectory(prefix="promptq-bench-") as folder, log.open("a") as output:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "result.json"
        write_job(job_file, job)
        interpreter = row.interpreter(peers)
        command = [
            str(interpreter),
            "-m",
            f"benchmarks.table.rows.{row.module}",
            job_file,
            result_file,
        ]
        environment = {
            **os.environ,
            **row.variables(peers),
            "PYTHONPATH": str(ROOT),
            # Environments' own tools, such as the compiler driver that vLLM calls, come first.
            "PATH": f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}",
        }
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(_MOST_SECONDS)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end_session(process)
        outcomes, failure = read_outcomes(result_file)
        return outcomes, f"it took over {_MOST_SECONDS:.0f} s" if timed_out else failure


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the row's process and all processes that it left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
