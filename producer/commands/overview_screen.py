"""A queue's overview, drawn for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from producer.commands.render import milliseconds, plain_table
from producer.overview import Overview
from shared.observations import Sample

_HOUR_MS = 3_600_000
_RECENT_MS = 60_000
_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 20


def overview_screen(overview: Overview, samples: Sequence[Sample], width: int) -> RenderableType:
    """The whole of it; `samples` are those of the last hour, `width` is the terminal's columns."""
    return Group(
        _title(overview),
        _figures(overview, samples),
        _charts(samples, overview.now_ms, max(20, min(60, width - 40))),
        _priorities(overview),
        _workers(overview),
    )


def _title(overview: Overview) -> Text:
    title = Text.assemble(("promptq", "bold"), f"  queue {overview.queue}")
    if overview.model:
        title.append(f", model {overview.model}")
    if overview.paused:
        title.append("  paused", style="bold yellow")
    return title


def _figures(overview: Overview, samples: Sequence[Sample]) -> Table:
    slots = sum(worker.max_num_seqs for worker in overview.workers)
    recent = [it for it in samples if overview.now_ms - it.at < _RECENT_MS]
    table = plain_table(
        "waiting", "delayed", "running", "tokens/s", "first token", "queue time", "dead letters"
    )
    table.add_row(
        f"{overview.waiting:,}",
        f"{overview.delayed:,}",
        f"{overview.running:,} of {slots:,}",
        f"{overview.tokens_per_second:,.0f}",
        milliseconds(_last(recent, lambda it: it.ttft_p50_ms)),
        milliseconds(_last(recent, lambda it: it.queue_p50_ms)),
        f"{overview.dead:,}",
    )
    return table


def _charts(samples: Sequence[Sample], now_ms: int, columns: int) -> Table:
    table = Table.grid(padding=(0, 2))
    lines: list[tuple[str, Callable[[Sample], float | None], Callable[[float], str]]] = [
        ("waiting", lambda it: it.waiting, lambda most: f"{most:,.0f}"),
        ("running", lambda it: it.running, lambda most: f"{most:,.0f}"),
        ("tokens/s", lambda it: it.tokens_per_second, lambda most: f"{most:,.0f}"),
        ("first token", lambda it: it.ttft_p50_ms, milliseconds),
        ("queue time", lambda it: it.queue_p50_ms, milliseconds),
    ]
    for name, value, written in lines:
        means = _means(samples, value, now_ms, columns)
        most = max((it for it in means if it is not None), default=0.0)
        table.add_row(name, Text(_sparkline(means, most), style="cyan"), f"up to {written(most)}")
    table.add_row("", Text("an hour ago".ljust(columns - 3) + "now", style="dim"), "")
    return table


def _means(
    samples: Sequence[Sample], value: Callable[[Sample], float | None], now_ms: int, columns: int
) -> list[float | None]:
    """Over equal parts of the last hour, the oldest first; None where nothing was told."""
    parts: list[list[float]] = [[] for _ in range(columns)]
    for sample in samples:
        at = (sample.at - (now_ms - _HOUR_MS)) * columns // _HOUR_MS
        if 0 <= at < columns and (told := value(sample)) is not None:
            parts[at].append(told)
    return [sum(it) / len(it) if it else None for it in parts]


def _sparkline(values: Sequence[float | None], most: float) -> str:
    steps = len(_BLOCKS) - 1
    return "".join(
        " " if it is None else _BLOCKS[round(it / most * steps) if most else 0] for it in values
    )


def _priorities(overview: Overview) -> RenderableType:
    if not overview.priorities:
        return Text()
    most = max(overview.priorities.values())
    table = plain_table("priority", "waiting", "", left=("",))
    for priority, num in overview.priorities.items():
        table.add_row(str(priority), f"{num:,}", _bar(num / most))
    return table


def _workers(overview: Overview) -> RenderableType:
    if not overview.workers:
        return Text("No worker is alive: start one with promptq worker.")
    table = plain_table(
        "worker", "state", "heartbeat", "slots", "KV blocks", "tokens/s", "step", "preempted",
        left=("worker", "state"),
    )  # fmt: skip
    for worker in overview.workers:
        age = max(0, overview.now_ms - worker.heartbeat_at) // 1000
        table.add_row(
            escape(worker.worker_id),
            worker.state if worker.state == "running" else f"[yellow]{escape(worker.state)}[/]",
            f"{age} s ago" if age else "now",
            f"{worker.num_running} of {worker.max_num_seqs}",
            f"{worker.kv_used_blocks:,} of {worker.kv_blocks:,}",
            f"{worker.recent_tokens_per_second:,.0f}",
            milliseconds(worker.step_ms),
            f"{worker.num_preemptions:,}",
        )
    return table


def _bar(share: float) -> Text:
    return Text("█" * max(1, round(share * _BAR_WIDTH)), style="cyan")


def _last(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    return next((told for it in reversed(samples) if (told := value(it)) is not None), None)
