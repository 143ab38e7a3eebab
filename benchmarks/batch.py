"""Measures large batch files: time, and the memory of gateway and jobs.

A file goes through a gateway's `/v1/files` and `/v1/batches`, `promptq jobs` runs it, and a worker
on the model-free engine answers. The first file has as many lines as a file may have. The second
file has about as many bytes as a file may have, in few lines. A peak is the largest resident memory
of a process (VmHWM). If the jobs have several processes, the largest peak counts.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import openai
from rich.table import Table

from benchmarks.lib.children import child
from benchmarks.lib.memory import peak_bytes
from promptq.producer.batch_store.input_file import MAX_FILE_BYTES, MAX_LINES
from promptq.producer.commands.screens.terminal import console_for_list
from promptq.shared.server.embedded import EmbeddedServer

LOADS = ((MAX_LINES, MAX_FILE_BYTES // MAX_LINES - 250), (40, 5_000_000))
"""Number of lines, and bytes of each line."""
_LOOK_SECONDS = 0.05


def write_lines(path: Path, count: int, num_bytes: int) -> None:
    """Write `count` lines with `num_bytes` of metadata each, because metadata causes no work."""
    with path.open("w") as file:
        for number in range(count):
            metadata = {"text": "x" * num_bytes}
            body = {"prompt": "Hi", "max_tokens": 5, "seed": number, "metadata": metadata}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")


class Peaks:
    """The largest peak memory (`largest`, in bytes) that one process of a tree of processes had.
    Call `look` often: each call reads the peaks of the processes that run at that time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.largest = 0

    def look(self) -> None:
        for pid in family_of(self._pid):
            with suppress(OSError, IndexError):
                self.largest = max(self.largest, peak_bytes([pid]))


def family_of(pid: int) -> list[int]:
    """Returns the ids of a process and all its descendants."""
    family = [pid]
    for member in family:
        with suppress(OSError):
            for children in Path(f"/proc/{member}/task").glob("*/children"):
                family += map(int, children.read_text().split())
    return family


def measure(source: Path, folder: Path) -> tuple[float, float, int, int, int]:
    """Upload the file `source`, and run it as a batch. Returns the seconds of the upload and of the
    run, and three peaks in bytes: the gateway's before and after the upload, and the jobs'."""
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedServer()).url
        environment = {
            "PROMPTQ_REDIS_URL": url,
            "PROMPTQ_FILES_DIR": str(folder),
            "TMPDIR": str(folder),
        }
        stack.enter_context(child("promptq.worker", "--model", "model-free", **environment))
        command = ("promptq.producer.cli", "gateway", "--port", "0")
        gateway, said = stack.enter_context(child(*command, **environment))
        jobs, _ = stack.enter_context(child("promptq.producer.cli", "jobs", **environment))
        address = re.findall(r"http://[\d.]+:\d+", said)[0]
        client = stack.enter_context(openai.OpenAI(base_url=f"{address}/v1", api_key="none"))
        gateway_peaks, jobs_peaks = Peaks(gateway), Peaks(jobs)
        client.models.list()
        gateway_peaks.look()
        before = gateway_peaks.largest
        began = time.monotonic()
        file = client.files.create(file=source, purpose="batch")
        uploaded = time.monotonic()
        gateway_peaks.look()
        after = gateway_peaks.largest
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(_LOOK_SECONDS)
            jobs_peaks.look()
            batch = client.batches.retrieve(batch.id)
        ended = time.monotonic()
        if batch.status != "completed" or batch.request_counts is None:
            raise RuntimeError(f"the batch is {batch.status}: {batch.errors}")
        if batch.request_counts.failed:
            errors = client.files.content(batch.error_file_id or "").text[:500]
            raise RuntimeError(f"{batch.request_counts.failed} lines failed, the first: {errors}")
    return uploaded - began, ended - uploaded, before, after, jobs_peaks.largest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks batch", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="run for a few seconds, to try the benchmark"
    )
    options = parser.parse_args()
    share = 50 if options.quick else 1
    table = Table("lines", "MB", "upload, s", "run, s", "gateway, MiB", "a job's process, MiB")
    for num_lines, num_bytes in LOADS:
        count = max(1, num_lines // share)
        with tempfile.TemporaryDirectory(prefix="promptq-batch-") as name:
            source = Path(name) / "in.jsonl"
            write_lines(source, count, num_bytes)
            size = source.stat().st_size
            upload, run, before, after, jobs = measure(source, Path(name) / "files")
        cells = [f"{count:,}", f"{size / 1e6:.0f}", f"{upload:.1f}", f"{run:.1f}"]
        cells.append(f"{before / 2**20:.0f}, then {after / 2**20:.0f}")
        table.add_row(*cells, f"{jobs / 2**20:.0f}")
    console_for_list().print(table)


if __name__ == "__main__":
    main()
