"""Compares the targets with the measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.table.registry import ROWS
from benchmarks.table.statistics import Figures

Measured = dict[tuple[str, str, str], Figures]
"""Medians by (model, workload, row)."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure must reach `at_least`, and should reach `aim`. With `less_is_more`, both are upper
    limits."""

    name: str
    measured: float | None
    """None if the figure was not measured in this run."""
    at_least: float
    aim: float
    less_is_more: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        sign = -1 if self.less_is_more else 1
        if sign * self.measured >= sign * self.aim:
            return "aim"
        return "met" if sign * self.measured >= sign * self.at_least else "missed"


def targets(measured: Measured, floor_ratio: float | None) -> Iterator[Target]:
    """Yields all targets. `floor_ratio` is a decode step's time divided by its floor (473M, batch
    of 32)."""

    def ratio(
        figure: str, ours: tuple[str, str, str], theirs: tuple[str, str, str]
    ) -> float | None:
        return quotient(get(measured, ours, figure), get(measured, theirs, figure))

    def best_peer(model: str, workload: str) -> float | None:
        return best(measured, model, workload, "tokens_per_second")

    speed = "tokens_per_second"
    for model, aim, batch in (("473m", 1.25, 32), ("54m", 1.3, 64)):
        offline = (model, "burst", "vllm-offline")
        yield Target(
            f"burst, {model} at {batch}, over vLLM offline",
            ratio(speed, (model, "burst", "redis"), offline),
            1.0,
            aim,
        )
    for model, at_least, aim in (("473m", 1.1, 1.3), ("54m", 1.0, 1.2)):
        ours = get(measured, (model, "solo", "redis"), speed)
        yield Target(
            f"solo, {model}, over the best peer",
            quotient(ours, best_peer(model, "solo")),
            at_least,
            aim,
        )
    for title, figure, at_least, aim in (
        ("time to first token", "first_token_p95", 0.8, 0.5),
        ("inter-token latency", "gap_p95", 1.0, 0.7),
    ):
        value = ratio(figure, ("54m", "poisson", "redis"), ("54m", "poisson", "vllm-server"))
        name = f"poisson, 54m, {title} p95, over vLLM's server"
        yield Target(name, value, at_least, aim, less_is_more=True)
    for model in ("54m", "473m"):
        value = ratio(speed, (model, "burst", "redis"), (model, "burst", "engine"))
        yield Target(f"whole path through Redis over the engine alone, {model}", value, 0.97, 0.99)
    for model in ("473m", "54m"):
        keys = ((model, "burst", "vllm-worker"), (model, "burst", "vllm-server"))
        name = f"burst, {model}, vLLM's server behind Redis over its own streams"
        yield Target(name, ratio(speed, *keys), 0.95, 1.0)
        value = ratio("first_token_p95", *keys)
        yield Target(f"{name}, time to first token p95", value, 1.1, 1.0, less_is_more=True)
    name = "decode step over its floor, 473m at 32, length 250"
    yield Target(name, floor_ratio, 1.5, 1.25, less_is_more=True)
    for model in ("54m", "473m"):
        value = get(measured, (model, "long-guest", "redis"), "guest_ratio")
        name = f"long guest, {model}: p99 between tokens of the others over their p50 before"
        yield Target(name, value, 2.5, 1.5, less_is_more=True)
    for model in ("54m", "473m"):
        value = get(measured, (model, "shared-prefix", "redis"), "prompt_tokens")
        name = f"shared prefix, {model}: prompt tokens computed, of 33,792"
        yield Target(name, value, 2150, 2048, less_is_more=True)
    for model in ("54m", "473m"):
        value = ratio(speed, (model, "loose", "redis"), (model, "tight", "redis"))
        yield Target(f"loose limits over exact ones, {model}", value, 0.95, 1.0)
    for model in ("54m", "473m"):
        value = get(measured, (model, "burst", "redis"), "recomputed_tokens")
        name = f"tokens recomputed because others join or leave, burst, {model}"
        yield Target(name, value, 0, 0, less_is_more=True)
    rate = "requests_per_second"
    value = ratio(rate, ("model-free", "queue", "queue"), ("model-free", "queue", "bullmq"))
    yield Target("queue alone, over BullMQ", value, 0.5, 1.0)


def get(measured: Measured, key: tuple[str, str, str], figure: str) -> float | None:
    return measured.get(key, {}).get(figure)


def quotient(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs


def best(measured: Measured, model: str, workload: str, figure: str) -> float | None:
    """Returns the highest value that a peer reached."""
    found = [
        get(measured, (model, workload, row.name), figure)
        for row in ROWS.values()
        if not row.is_own and not row.format
    ]
    return max((value for value in found if value is not None), default=None)
