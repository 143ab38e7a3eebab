"""Carries out a whole run: all rows in turns, round by round; then `poisson`, at a rate that the
rounds measured."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.models import MODELS, model_dir
from benchmarks.table import workloads
from benchmarks.table.floor import Rates, decode_floor, measure_rates, torch_dtype
from benchmarks.table.jobs import Job, Request, Workload
from benchmarks.table.registry import ROWS, Row
from benchmarks.table.running import run_row
from benchmarks.table.statistics import Figures, Measured, figures, get, medians

MAX_MODEL_LEN = 4096
_LOAD = 0.7
"""The rate of `poisson`, as a share of the best peer's maximum rate."""
_QUEUE_BATCH = 256
MODEL_FREE = "model-free"


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run. Names are those of MODELS, WORKLOADS (with poisson and queue) and ROWS."""

    models: Sequence[str]
    workloads: Sequence[str]
    rows: Sequence[str]
    rounds: int
    seed: int
    seconds: float
    """The time in which requests of `poisson` arrive."""
    rate: float | None
    """Arrivals a second; None: derived from the burst of the best peer in this run."""
    queue_requests: int
    shorten: int
    """Outputs are this many times shorter than in the workload, except in `poisson` and `queue`."""
    cache: Path
    peers: Path
    log: Path


@dataclass(slots=True)
class Run:
    """The results of a run."""

    rates_of_rounds: list[Rates] = field(default_factory=list)
    rounds: dict[tuple[str, str, str], list[Figures]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """The figures of all rounds, by (model, workload, row)."""
    missing: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why a row has no results, or not all of them, by (model, row)."""
    arrivals: dict[str, float] = field(default_factory=dict)
    """Requests a second of `poisson`, by model."""

    @property
    def rates(self) -> Rates:
        """The machine's rates: medians, like all figures, because a shared machine's rates vary."""
        return Rates(
            statistics.median(each.bytes_per_second for each in self.rates_of_rounds),
            statistics.median(each.operations_per_second for each in self.rates_of_rounds),
        )

    @property
    def measured(self) -> Measured:
        return {key: medians(rounds) for key, rounds in self.rounds.items()}

    def floor_seconds(self, model: str) -> float:
        shape = MODELS[model]
        return decode_floor(shape, self.rates, shape.batch, workloads.FLOOR_LENGTH)


def carry_out(plan: Plan, tell: Callable[[str], None]) -> Run:
    """Run the plan. Calls `tell` with a line for each process that starts or fails."""
    run = Run()
    at_once = [name for name in plan.workloads if name in workloads.WORKLOADS]
    for number in range(plan.rounds):
        run.rates_of_rounds.append(measure_rates())
        for model in plan.models:
            for row in _rows(plan, at_once):
                names = [name for name in at_once if name in row.workloads]
                shape, seed = MODELS[model], plan.seed + number
                loads = [
                    workloads.shortened(workloads.WORKLOADS[name](shape, seed), plan.shorten)
                    for name in names
                ]
                _measure(plan, run, model, row, number, loads, tell)
        if "queue" in plan.workloads:
            requests = [Request([97], 1)] * plan.queue_requests
            for row in _rows(plan, ["queue"]):
                loads = [Workload("queue", requests)]
                _measure(plan, run, MODEL_FREE, row, number, loads, tell)
    if "poisson" in plan.workloads:
        _poisson(plan, run, tell)
    return run


def _poisson(plan: Plan, run: Run, tell: Callable[[str], None]) -> None:
    for model in plan.models:
        most = _fastest_peer(run.measured, model)
        if plan.rate is None and most is None:
            tell(f"poisson, {model}: left out; its rate needs a peer's burst, or --rate")
            continue
        rate = plan.rate or _LOAD * (most or 0.0)
        run.arrivals[model] = rate
        for number in range(plan.rounds):
            loads = [workloads.poisson(plan.seed + number, rate, plan.seconds)]
            for row in _rows(plan, ["poisson"]):
                _measure(plan, run, model, row, number, loads, tell)


def _fastest_peer(measured: Measured, model: str) -> float | None:
    """Returns the most requests a second that a peer served in a burst."""
    found = [
        get(measured, (model, "burst", row.name), "requests_per_second")
        for row in ROWS.values()
        if not row.is_own and not row.format
    ]
    return max((value for value in found if value is not None), default=None)


def _rows(plan: Plan, names: Sequence[str]) -> list[Row]:
    """Returns the rows of the plan that run any of these workloads."""
    return [ROWS[name] for name in plan.rows if ROWS[name].workloads & set(names)]


def _measure(
    plan: Plan,
    run: Run,
    model: str,
    row: Row,
    number: int,
    loads: list[Workload],
    tell: Callable[[str], None],
) -> None:
    reason = row.missing(plan.peers)
    if reason is None:
        tell(f"round {number + 1}/{plan.rounds}: {model}, {row.title} ...")
        outcomes, reason = run_row(row, _job(plan, model, row, number, loads), plan.log)
        by_name = {load.name: load for load in loads}
        for name, outcome in outcomes.items():
            if name not in by_name:
                continue
            wanted = sum(request.num_output for request in by_name[name].requests)
            came = sum(trace.num_tokens for trace in outcome.traces)
            if came != wanted:
                reason = f"{name}: {came} tokens came instead of {wanted}"
                continue
            found = figures(outcome)
            run.rounds[model, name, row.name].append(found)
            tell(f"  {name}: {found['tokens_per_second']:,.1f} tokens/s")
    if reason is not None:
        tell(f"{row.title}: {reason}")
        run.missing[model, row.name] = reason


def _job(plan: Plan, model: str, row: Row, number: int, loads: list[Workload]) -> Job:
    if model == MODEL_FREE:
        return Job("", _QUEUE_BATCH, 0, 0, loads, str(plan.peers), torch_dtype())
    shape = MODELS[model]
    return Job(
        model=str(model_dir(shape, plan.cache)),
        max_num_seqs=shape.batch,
        kv_cache_bytes=shape.kv_cache_bytes,
        max_model_len=MAX_MODEL_LEN,
        workloads=[workloads.warm_up(shape, plan.seed + number), *loads],
        peers=str(plan.peers),
        torch_dtype=torch_dtype(),
        format=row.format,
    )
