"""Formats tables and lists for the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.runtime.printable import printable

if TYPE_CHECKING:
    from promptq.producer.admin.api_keys import ApiKey
    from promptq.producer.admin.autoscaling import Scaling
    from promptq.producer.admin.dead_letters import DeadLetter
    from promptq.producer.admin.queue_stats import QueueStats
    from promptq.producer.admin.queue_views import QueueView
    from promptq.producer.webhooks.deliveries import DeadWebhook

_PAYLOAD_WIDTH = 20


def why_no_worker(stats: QueueStats) -> Text:
    """Returns a sentence that says why no worker claims a queue's requests, with advice."""
    return Text(f"{stats.why_no_worker[:1].upper()}{stats.why_no_worker[1:]}.")


def num_workers_of(view: QueueView) -> str:
    """Returns the number of workers that have loaded the model, as text for a table of queues."""
    is_on_call = view.has_standby and not view.num_workers
    return "on call" if is_on_call else f"{view.num_workers:,}"


def milliseconds(value: float | None) -> str:
    """Returns a duration (milliseconds) as text in a suitable unit."""
    if value is None:
        return "–"
    if value < 10_000:
        return f"{value:.0f} ms"
    if value < 60_000:
        return f"{value / 1000:.1f} s"
    minutes, rest = divmod(round(value / 1000), 60)
    return f"{minutes:,} min {rest} s"


def number(value: int | None) -> str:
    """Returns a count as text. None is an unknown count."""
    return "–" if value is None else f"{value:,}"


def tokens(count: int) -> str:
    """Returns a number of tokens as text."""
    return "1 token" if count == 1 else f"{count} tokens"


def byte_size(value: float) -> str:
    """Returns a size (bytes) as text in a suitable unit."""
    if not value:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def shortened(name: str, length: int) -> str:
    """Returns the name. A name of more than `length` characters (at least 3) loses its middle,
    because similar names differ at their ends."""
    if len(name) <= length:
        return name
    end = length // 2
    return f"{name[: length - end - 1]}…{name[-end:]}"


def plain_table(*columns: str, title: str | None = None, left: Sequence[str] = ()) -> Table:
    """Returns a table without a frame. The columns in `left` are aligned left, the others right."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold"
    )
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def width_of(columns: Mapping[str, Sequence[str]]) -> int:
    """Returns the width of a `plain_table` without line breaks, in characters."""
    return sum(3 + max(map(len, (name, *cells))) for name, cells in columns.items()) - 1


def fitting(
    columns: Mapping[str, Sequence[str]], width: int, dropped_first: Sequence[str]
) -> Mapping[str, Sequence[str]]:
    """Returns the columns of a `plain_table` that fit into `width` characters.

    Columns are dropped in the order of `dropped_first`, which may also name missing columns.
    """
    kept = dict(columns)
    for name in dropped_first:
        if width_of(kept) > width:
            kept.pop(name, None)
    return kept


def queue_table(stats: QueueStats) -> RenderableType:
    """Returns a table of the number of requests in each state, below a title."""
    title = Text(f"queue {stats.queue}", style="bold")
    title.append(f", model {printable(stats.model[:200])}" if stats.model else "")
    title.append(", paused" if stats.paused else "")
    table = plain_table("waiting", "delayed", "active", "dead letters")
    table.add_row(*map(number, (stats.waiting, stats.delayed, stats.active, stats.dead)))
    affinity = Text(f"affinity: {stats.affinity}\n" if stats.affinity else "", end="")
    return Group(title, table, affinity)  # a table breaks its title at its width


def scaling_table(scalings: Sequence[Scaling]) -> Table:
    """Returns a table of the wanted numbers of workers, with one row for each queue."""
    texts = ("queue", "because")
    columns = ("queue", "workers", "wanted", "because", "work waiting", "work running")
    table = plain_table(*columns, left=texts)
    for one in scalings:
        times = (one.waiting_seconds, one.running_seconds)
        work = ("not known" if each is None else f"{each:,.1f} s" for each in times)
        cells = (f"{one.workers:,}", f"{one.desired:,}", one.because, *work)
        table.add_row(*(Text(cell) for cell in (printable(one.queue), *cells)))
    return table


def dead_letters_table(letters: Sequence[DeadLetter], width: int) -> Table:
    """Returns a table with one row for each dead letter. Ids stay whole, because people copy them.
    In a narrow terminal, columns are left out and payloads are cut."""
    columns = {
        "id": [letter.request_id for letter in letters],
        "buried": [clock_time(letter.buried_at) for letter in letters],
        "crashes": [f"{letter.crashes:,}" for letter in letters],
        "tokens": [f"{letter.num_tokens:,}" for letter in letters],
    }
    kept = fitting(columns, width - _PAYLOAD_WIDTH, ("tokens", "crashes", "buried"))
    room = max(_PAYLOAD_WIDTH - 3, min(80, width - width_of(kept) - 3))
    table = plain_table(*kept, "payload", left=("id", "payload"))
    table.columns[0].no_wrap = True
    for letter, *cells in zip(letters, *kept.values(), strict=True):
        table.add_row(*map(Text, cells), Text(letter.payload[:room]))
    return table


def dead_webhooks_table(webhooks: Sequence[DeadWebhook]) -> Table:
    """Returns a table with one row for each webhook."""
    table = plain_table(
        "given up", "request", "tenant", "attempts", "reason", left=("request", "tenant", "reason")
    )
    table.columns[1].no_wrap = True  # people copy ids
    for item in webhooks:
        request, tenant, reason = map(printable, (item.request_id, item.tenant, item.reason))
        table.add_row(
            clock_time(item.at), Text(request), Text(tenant), str(item.attempts), Text(reason)
        )
    return table


def api_keys_list(keys: Sequence[ApiKey], width: int) -> RenderableType:
    """Returns a table with one row for each key; in a narrow terminal, a list for each key."""
    now = time.time() * 1000
    columns = {
        "name": [key.name for key in keys],
        "key": [f"…{key.hint}" for key in keys],
        "tenant": [
            f"{key.tenant} (its own)" if key.is_own_tenant else f"{key.tenant}" for key in keys
        ],
        "requests/min": [number(key.requests_per_minute or None) for key in keys],
        "tokens/min": [number(key.tokens_per_minute or None) for key in keys],
        "most urgent priority": [str(key.highest_priority) for key in keys],
        "may call": [_calls(key) for key in keys],
        "models": [", ".join(key.models) if key.models is not None else "all" for key in keys],
        "expires": ["expired" if key.is_over(now) else _minute(key.expires_at) for key in keys],
        "last used": [_minute(key.last_used_at) for key in keys],
        "made": [_minute(key.created_at) for key in keys],
    }
    rows = zip(*columns.values(), strict=True)
    if width_of(columns) > width:
        return Group(*(_facts_of_one(dict(zip(columns, row, strict=True))) for row in rows))
    table = plain_table(*columns, left=("name", "key", "tenant", "may call", "models"))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _facts_of_one(facts: Mapping[str, str]) -> RenderableType:
    """Returns facts about one key. The first fact is the heading."""
    (_, heading), *rest = facts.items()
    grid = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, fact in rest:
        grid.add_row(name, Text(fact))
    return Group(Text(heading, style="bold", overflow="fold"), Padding(grid, (0, 0, 0, 2)))


def _calls(key: ApiKey) -> str:
    """Returns the key's scopes, or `all`, and whether the key is for administrators."""
    calls = "all" if key.scopes is None else " ".join(key.scopes)
    return f"{calls}, admin" if key.is_admin else calls


def _minute(at_ms: int) -> str:
    return clock_time(at_ms)[:16] if at_ms else "never"


def clock_time(unix_ms: float) -> str:
    """Returns a time of the server as text, in this machine's time zone; `–` after year 9999."""
    try:
        return f"{datetime.fromtimestamp(unix_ms / 1000):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # any program may have written the time
        return "–"


def workers_tables(workers: Sequence[WorkerStats], width: int) -> Group:
    """Returns tables with one column for each worker, because there are more facts than workers.

    A table ends when no further worker fits into `width` characters.
    """
    tables: list[dict[str, list[str]]] = []
    for worker in workers:
        facts = _facts(worker)
        column = {worker.worker_id: [*facts.values()]}
        if tables and width_of(tables[-1] | column) + 2 <= width:
            tables[-1] |= column
        else:
            tables.append({"": [*facts], **column})
    shown = []
    for columns in tables:
        names = [Column(Text(name), justify="right", overflow="fold") for name in columns]
        names[0] = Column(no_wrap=True)
        shown.append(Table(*names, box=box.SIMPLE_HEAD))
        for cells in zip(*columns.values(), strict=True):
            shown[-1].add_row(*map(Text, cells))
    return Group(Text("workers", style="bold"), *shown)


def _facts(w: WorkerStats) -> dict[str, str]:
    return {
        "state": w.state + ", overflow" * w.overflow,
        "holds back because": printable(w.holds_back) or "–",
        "model": w.model,
        "device": f"{w.device} {w.dtype}".strip(),
        "refused fields": printable(w.refused) or "–",
        "slots in use": f"{w.num_running} of {w.max_num_seqs}",
        "prepared, waiting": f"{w.num_waiting + w.num_prefetched}",
        "KV tokens in use": f"{w.kv_used_tokens:,} of {w.kv_tokens:,}",
        "requests processed": f"{w.num_processed:,}",
        "prompt tokens": f"{w.prompt_tokens:,}",
        "  and from the cache": number(w.reported("cached_tokens")),
        "generated tokens": f"{w.generation_tokens:,}",
        "tokens/s": f"{w.tokens_per_second:,.0f}",
        "drafted": number(w.reported("drafted_tokens")),
        "  and accepted": number(w.reported("accepted_tokens")),
        "recomputed tokens": number(w.reported("recomputed_tokens")),
        "preemptions": f"{w.num_preemptions:,}",
        "mean queue time": milliseconds(w.mean_queue_ms),
        "mean prompt time": milliseconds(w.mean_prompt_ms),
        "mean generation time": milliseconds(w.mean_generation_ms),
        "recurrent states": byte_size(w.state_bytes),
        "peak memory": byte_size(w.peak_memory_bytes),
    }


def settings_list(rows: Sequence[dict[str, Any]]) -> Group:
    """Returns the settings under the names of their processes, with values and descriptions."""
    lines: list[RenderableType] = []
    for process, group in groupby(rows, key=itemgetter("process")):
        title = (process or "common to all processes").capitalize()
        lines.append(Text(f"\n{title}:" if lines else f"{title}:", style="bold"))
        for row in group:
            lines += [_setting(row), Padding(Text(row["description"]), (0, 0, 0, 4))]
    return Group(*lines)


def _as_typed(value: Any) -> str:
    """Returns a setting's value in the form of an environment variable."""
    shown = json.dumps(value) if isinstance(value, bool | tuple | list) else value
    return "–" if value is None else str(shown)


def _setting(row: dict[str, Any]) -> Text:
    value, default = _as_typed(row["value"]), _as_typed(row["default"])
    if value == default:
        return Text(f"{row['variable']}  {value}")
    return Text.assemble((f"{row['variable']}  {value}", "bold"), (f"  (default {default})", "dim"))
