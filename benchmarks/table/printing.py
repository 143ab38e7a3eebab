"""Prints the results of a run as tables in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks.table.registry import ROWS
from benchmarks.table.statistics import Figures, Measured, get

_PEERS = ("vllm-offline", "vllm-server", "llama-server", "continuous", "static")
_SHORT = {"vllm-offline": "vLLM", "vllm-server": "vLLM server", "llama-server": "llama.cpp"}


def print_results(
    console: Console, measured: Measured, missing: dict[tuple[str, str], str]
) -> None:
    """Print one table for each model and workload. A row without results shows the reason.

    `missing` has the reasons by (model, row).
    """
    for model, workload in dict.fromkeys(key[:2] for key in measured):
        table = Table(title=f"{workload}, {model}", title_justify="left")
        table.add_column("")
        speed = "requests/s" if workload == "queue" else "tokens/s"
        for heading in (speed, "first token p50 / p95", "between tokens p50 / p95", "peak MiB"):
            table.add_column(heading, justify="right")
        peers = [peer for peer in _PEERS if (model, workload, peer) in measured]
        for peer in peers:
            table.add_column(f"x {_SHORT.get(peer, peer)}", justify="right")
        for row in ROWS.values():
            if workload not in row.workloads:
                continue
            found = measured.get((model, workload, row.name))
            if found is not None:
                ratios = [
                    _ratio(found, get(measured, (model, workload, peer), "tokens_per_second"))
                    for peer in peers
                ]
                table.add_row(row.title, *_cells(found, workload), *ratios)
            elif reason := missing.get((model, row.name)):
                table.add_row(row.title, f"[yellow]missing: {reason}[/]")
        console.print(table)


def _cells(found: Figures, workload: str) -> list[str]:
    speed = found["requests_per_second" if workload == "queue" else "tokens_per_second"]
    return [
        f"{speed:,.1f}",
        _pair(found, "first_token"),
        _pair(found, "gap"),
        f"{found['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in found else "-",
    ]


def _pair(found: Figures, name: str) -> str:
    if f"{name}_p50" not in found:
        return "-"
    return " / ".join(f"{found[f'{name}_{share}'] * 1000:,.1f}" for share in ("p50", "p95")) + " ms"


def _ratio(found: Figures, theirs: float | None) -> str:
    return "-" if not theirs else f"{found['tokens_per_second'] / theirs:.2f}"
