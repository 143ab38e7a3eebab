"""Jobs and outcomes of a row's process, as JSON files.

Rows of peers run in environments that have little but the peer. So this file and the rows use only
the standard library and the peer's packages.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """One request: token ids in, exactly `num_output` tokens out, greedily."""

    prompt: list[int]
    num_output: int
    at: float = 0.0
    """The time of arrival, in seconds after the workload's start."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Job:
    """The job of one process of one row: all workloads of one model, one after the other."""

    model: str
    """Directory of the model."""
    max_num_seqs: int
    kv_cache_bytes: int
    max_model_len: int
    workloads: list[Workload]
    peers: str
    """Directory that holds the peers' environments."""
    torch_dtype: str
    """Number format of peers that multiply through torch: floor.torch_dtype()."""
    format: str = ""
    """The format of the weights, for rows that need a certain one."""


@dataclass(slots=True)
class Trace:
    """The times of one request, in `time.perf_counter()` seconds of the row's process."""

    submitted: float
    events: list[float] = field(default_factory=list)
    """The times of events with tokens; empty if a row reports only the end."""
    num_tokens: int = 0


@dataclass(slots=True)
class Outcome:
    """The result of one workload in one round."""

    seconds: float
    """From the first request's arrival to the last token."""
    traces: list[Trace]
    peak_bytes: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    """The engine's counts during the workload, by the names of `EngineStats`."""


def write_job(path: Path, job: Job) -> None:
    path.write_text(json.dumps(asdict(job)))


def read_job(path: Path) -> Job:
    raw = json.loads(path.read_text())
    workloads = [
        Workload(each["name"], [Request(**request) for request in each["requests"]])
        for each in raw.pop("workloads")
    ]
    return Job(**raw, workloads=workloads)


def read_outcomes(path: Path) -> tuple[dict[str, Outcome], str | None]:
    """Returns outcomes by workload, and the reason if the row could not finish."""
    if not path.exists():
        return {}, "it ended without a result"
    raw = json.loads(path.read_text())
    outcomes = {
        name: Outcome(**{**each, "traces": [Trace(**trace) for trace in each["traces"]]})
        for name, each in raw["outcomes"].items()
    }
    return outcomes, raw["failure"]


def main(run: Callable[[Job, Callable[[str, Outcome], None]], None]) -> None:
    """Run a row's process: `python -m benchmarks.table.rows.NAME JOB RESULT`.

    `run` must call its second argument after each workload, so that a later failure keeps the
    earlier results. The file RESULT gets the outcomes, and the failure if `run` raises an
    exception.
    """
    job, result = read_job(Path(sys.argv[1])), Path(sys.argv[2])
    outcomes: dict[str, Any] = {}
    failure = None
    try:
        run(job, lambda name, outcome: outcomes.__setitem__(name, asdict(outcome)))
    except Exception as error:  # whatever it is, the table names it
        traceback.print_exc()
        failure = (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        )
    result.write_text(json.dumps({"outcomes": outcomes, "failure": failure}))


now = time.perf_counter
