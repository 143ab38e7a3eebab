"""BullMQ with jobs that do nothing, at a concurrency of 100, to compare with promptq's queue
alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.table.jobs import Job, Outcome, Trace, main, now
from promptq.shared.server.embedded import EmbeddedServer

_SCRIPT = Path(__file__).with_name("bullmq.mjs")


def run(job: Job, done: Callable[[str, Outcome], None]) -> None:
    environment = {**os.environ, "BULLMQ_FOLDER": str(Path(job.peers) / "bullmq")}
    for workload in job.workloads:
        count = len(workload.requests)
        with EmbeddedServer() as server:
            environment["BULLMQ_PASSWORD"] = server.password
            worker, producer = (
                subprocess.Popen(
                    ["node", str(_SCRIPT), role, str(server.port), str(count)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                for role in ("worker", "producer")
            )
            _expect(worker, b"ready")
            _expect(producer, b"ready")
            started = now()
            assert producer.stdin is not None
            producer.stdin.write(b"go\n")
            producer.stdin.flush()
            _expect(worker, b"finished")
            seconds = now() - started
            worker.kill()
            producer.wait()
        done(workload.name, Outcome(seconds, [Trace(started, num_tokens=1)] * count))


def _expect(process: subprocess.Popen[bytes], word: bytes) -> None:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != word:
        raise RuntimeError(f"{_SCRIPT.name} said {line!r} where {word!r} was due")


if __name__ == "__main__":
    main(run)
