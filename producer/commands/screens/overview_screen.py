"""A queue's overview, drawn for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from promptq.producer.admin.overview import Overview
from promptq.producer.admin.queue_views import QueueView
from promptq.producer.commands.screens.render import (
    fitting,
    milliseconds,
    num_workers_of,
    plain_table,
    shortened,
    why_no_worker,
    width_of,
)
from promptq.shared.protocol.worker_stats import Sample, WorkerStats
from promptq.shared.runtime.printable import printable

_HOUR_MS = 3_600_000
_RECENT_MS = 60_000
_BLOCKS = "▁▂▃▄▅▆▇█"
_LATE_SECONDS = 3
_SHORTEST_NAME = 16
_DROPPED_FIRST = (
    *("refuses", "holds back because", "starved", "slot wait", "prepared"),
    *("preempted", "step", "KV blocks", "heartbeat", "tokens/s"),
)


def overview_screen(overview: Overview, samples: Sequence[Sample], width: int) -> RenderableType:
    """Returns a queue's overview with charts of its samples. `width` is in characters."""
    return Group(
        _title(overview),
        _figures(overview, samples, width),
        _charts(samples, overview.now_ms, max(10, min(60, width - 32))),
        _workers(overview, width),
        _priorities(overview, width),
    )


def queues_list(views: Sequence[QueueView], shown: str, hint: str) -> RenderableType:
    """Returns a server's queues, one on each line. `shown` is the queue whose overview is below."""
    table = plain_table("queue", "model", "workers", "waiting", "active", left=["queue", "model"])
    for view in views:
        numbers = (num_workers_of(view), f"{view.num_waiting:,}", f"{view.num_active:,}")
        style = "bold" if view.queue == shown else ""
        cells = (view.queue, view.model[:200], *numbers)
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    return Group(table, Text(hint, style="dim"), Text()) if hint else Group(table, Text())


def _title(overview: Overview) -> Text:
    title = Text.assemble(("promptq", "bold"), f"  queue {overview.queue}")
    if overview.model:
        title.append(f", model {overview.model[:200]}")
    if overview.paused:
        title.append("  paused", style="bold yellow")
    if overview.server_warning:
        title.append(f"\nwarning: {printable(overview.server_warning)}", style="bold yellow")
    return title


def _figures(overview: Overview, samples: Sequence[Sample], width: int) -> RenderableType:
    slots = sum(worker.max_num_seqs for worker in overview.workers)
    recent = [sample for sample in samples if overview.now_ms - sample.at < _RECENT_MS]
    figures = {
        "waiting": f"{overview.waiting:,}",
        "delayed": f"{overview.delayed:,}",
        "running": f"{overview.running:,} of {slots:,}",
        "tokens/s": f"{overview.tokens_per_second:,.0f}",
        "first token": milliseconds(_last(recent, lambda sample: sample.ttft_p50_ms)),
        "queue time": milliseconds(_last(recent, lambda sample: sample.queue_p50_ms)),
        "dead": f"{overview.dead:,}",
    }
    if width_of({name: [value] for name, value in figures.items()}) <= width:
        table = plain_table(*figures)
        table.add_row(*figures.values())
        return table
    table = Table.grid(padding=(0, 2))
    for name, value in figures.items():
        table.add_row(name, value)
    return Padding(table, (1, 0))


def _charts(samples: Sequence[Sample], now_ms: int, columns: int) -> Table:
    table = Table.grid(padding=(0, 2))
    lines: list[tuple[str, Callable[[Sample], float | None], Callable[[float], str]]] = [
        ("waiting", lambda sample: sample.waiting, lambda most: f"{most:,.0f}"),
        ("running", lambda sample: sample.running, lambda most: f"{most:,.0f}"),
        ("tokens/s", lambda sample: sample.tokens_per_second, lambda most: f"{most:,.0f}"),
        ("first token", lambda sample: sample.ttft_p50_ms, milliseconds),
        ("queue time", lambda sample: sample.queue_p50_ms, milliseconds),
    ]
    for name, value, written in lines:
        peaks = _peaks(samples, value, now_ms, columns)
        most = max((peak for peak in peaks if peak is not None), default=None)
        limit = "–" if most is None else f"up to {written(most)}"
        table.add_row(name, Text(_sparkline(peaks, most or 0.0), style="cyan"), limit)
    ago = "an hour ago" if columns > 20 else "-1 h"
    table.add_row("", Text(ago.ljust(columns - 3) + "now", style="dim"), "")
    return table


def _peaks(
    samples: Sequence[Sample], value: Callable[[Sample], float | None], now_ms: int, columns: int
) -> list[float | None]:
    """Returns the highest `value` in each of `columns` parts of the last hour; None: no samples."""
    parts: list[list[float]] = [[] for _ in range(columns)]
    for sample in samples:
        at = (sample.at - (now_ms - _HOUR_MS)) * columns // _HOUR_MS
        if 0 <= at < columns and (number := value(sample)) is not None:
            parts[at].append(number)
    return [max(part, default=None) for part in parts]


def _sparkline(values: Sequence[float | None], most: float) -> str:
    steps = len(_BLOCKS) - 1
    return "".join(
        " " if number is None else _BLOCKS[round(number / most * steps) if most else 0]
        for number in values
    )


def _priorities(overview: Overview, width: int) -> RenderableType:
    if not overview.priorities:
        return Text()
    most = max(overview.priorities.values())
    table = plain_table("priority", "waiting", "", left=("",))
    for priority, num in overview.priorities.items():
        bar = Text("█" * max(1, round(num / most * min(20, width - 25))), style="cyan")
        table.add_row(str(priority), f"{num:,}", bar)
    return table


def _workers(overview: Overview, width: int) -> RenderableType:
    """Returns a table of workers. If the queue needs more or fewer, a line above says so."""
    table = _workers_table(overview, width)
    wanted = overview.scaling
    if wanted.desired == wanted.workers:
        return table
    text = f"Workers wanted: {wanted.desired:,}, because {wanted.because}."
    return Group(Text(text, style="yellow"), table)


def _workers_table(overview: Overview, width: int) -> RenderableType:
    """Returns a table of workers. If not all columns fit, the least important ones are left out."""
    if not overview.workers:
        return why_no_worker(overview)
    longest = max(_SHORTEST_NAME, width // 3)
    columns = {
        "worker": [shortened(worker.worker_id, longest) for worker in overview.workers],
        "state": [worker.state for worker in overview.workers],
        "heartbeat": [_heartbeat(overview, worker) for worker in overview.workers],
        "slots": [f"{worker.num_running} of {worker.max_num_seqs}" for worker in overview.workers],
        "KV blocks": [
            f"{worker.kv_used_blocks:,} of {worker.kv_blocks:,}" for worker in overview.workers
        ],
        "tokens/s": [f"{worker.recent_tokens_per_second:,.0f}" for worker in overview.workers],
        "step": [milliseconds(worker.reported("step_ms")) for worker in overview.workers],
        "preempted": [f"{worker.num_preemptions:,}" for worker in overview.workers],
        "prepared": [f"{worker.mean_prefetched:.1f}" for worker in overview.workers],
        "slot wait": [milliseconds(worker.mean_prefetch_wait_ms) for worker in overview.workers],
        "starved": [f"{worker.num_prefetch_empty:,}" for worker in overview.workers],
    }
    for title, name in (("refuses", "refused"), ("holds back because", "holds_back")):
        if any(getattr(worker, name) for worker in overview.workers):
            columns[title] = [printable(getattr(worker, name)) for worker in overview.workers]
    kept = fitting(columns, width, _DROPPED_FIRST)
    table = plain_table(*kept, left=("worker", "state", "refuses", "holds back because"))
    for worker, *cells in zip(overview.workers, *kept.values(), strict=True):
        is_well = worker.state == "running" and _silent_seconds(overview, worker) <= _LATE_SECONDS
        table.add_row(*map(Text, cells), style="" if is_well else "yellow")
    return table


def _silent_seconds(overview: Overview, worker: WorkerStats) -> int:
    return max(0, overview.now_ms - worker.heartbeat_at) // 1000


def _heartbeat(overview: Overview, worker: WorkerStats) -> str:
    seconds = _silent_seconds(overview, worker)
    return f"{seconds} s ago" if seconds else "now"


def _last(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    values = map(value, reversed(samples))
    return next((number for number in values if number is not None), None)
