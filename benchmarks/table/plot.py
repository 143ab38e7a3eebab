"""Plots a run: tokens a second of each row, relative to the best peer's."""

from __future__ import annotations

from pathlib import Path

from benchmarks.table.registry import ROWS
from benchmarks.table.statistics import Measured, get


def plot(measured: Measured, file: Path) -> None:
    """Draw one panel for each model and workload, into `file`. Raises ImportError without
    matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [
        key
        for key in dict.fromkeys(key[:2] for key in measured)
        if key[1] in ("burst", "solo", "shared-prefix")
    ]
    if not shown:
        return
    figure, axes = pyplot.subplots(
        len(shown), 1, figsize=(8, 0.6 + 2.2 * len(shown)), squeeze=False, layout="constrained"
    )
    for (model, workload), axis in zip(shown, axes[:, 0], strict=True):
        speeds = {
            row: speed
            for row in ROWS.values()
            if (speed := get(measured, (model, workload, row.name), "tokens_per_second"))
        }
        bars = axis.barh(
            [row.title for row in speeds],
            list(speeds.values()),
            color=["#2a6f97" if row.is_own else "#b0b7bd" for row in speeds],
        )
        axis.bar_label(bars, fmt="{:,.0f}", padding=3)
        axis.set_title(f"{workload}, {model}: tokens a second", loc="left", fontsize=10)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
