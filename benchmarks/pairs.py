"""This checkout against another one, in alternating pairs: has anything become slower?

`make bench-pairs ARGS="../earlier"`, with a checkout that has an environment of its own (`make
.venv/.set-up`). Nothing is drafted, as random weights repeat themselves. Each ratio is this
checkout's figure over the other's, of waiting times the other's over this one's: more is better.
The interval of the median is the span of all pairs, which for seven holds it in 98 of 100 cases.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_FIGURES = {
    "burst, whole path, tokens/s": ("burst", "redis", "tokens_per_second", False),
    "burst, first token p95": ("burst", "redis", "first_token_p95", True),
    "solo, first token p50": ("solo", "redis", "first_token_p50", True),
    "solo, whole path, tokens/s": ("solo", "redis", "tokens_per_second", False),
    "poisson, first token p95": ("poisson", "redis", "first_token_p95", True),
    "poisson, between tokens p95": ("poisson", "redis", "gap_p95", True),
    "queue alone, requests/s": ("queue", "queue", "requests_per_second", False),
}
"""By title: workload, row, figure, and whether less is more."""


def measure(checkout: Path, options: argparse.Namespace, number: int) -> dict[str, float]:
    """One round of a checkout's own benchmark: its figures by title."""
    with tempfile.TemporaryDirectory(prefix="promptq-pairs-") as folder:
        report = Path(folder) / "report.json"
        command = [
            *(str(checkout / ".venv" / "bin" / "python"), "-m", "benchmarks"),
            *("--models", "54m", "--rows", "redis,queue", "--rounds", "1"),
            *("--workloads", "burst,solo,poisson,queue", "--rate", str(options.rate)),
            *("--seconds", str(options.seconds), "--seed", str(number)),
            *("--cache", str(options.cache), "--json", str(report)),
        ]
        environment = {**os.environ, "PROMPTQ_SPECULATIVE_TOKENS": "0"}
        subprocess.run(
            command, check=True, cwd=checkout, env=environment, stdout=subprocess.DEVNULL
        )
        rounds = json.loads(report.read_text())["rounds"]
    told = {(it["workload"], it["row"]): it["figures"][0] for it in rounds}
    return {title: told[at[:2]][at[2]] for title, at in _FIGURES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-pairs", description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second of poisson")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long poisson goes on")
    parser.add_argument("--cache", type=Path, default=_ROOT / "benchmarks" / ".cache")
    options = parser.parse_args()
    options.cache = options.cache.resolve()
    checkouts = (_ROOT, options.other.resolve())
    ratios: dict[str, list[float]] = {title: [] for title in _FIGURES}
    for number in range(options.pairs):
        in_turn = checkouts if number % 2 == 0 else checkouts[::-1]
        measured = {checkout: measure(checkout, options, number) for checkout in in_turn}
        this, other = (measured[checkout] for checkout in checkouts)
        for title, (*_, less_is_more) in _FIGURES.items():
            ratio = other[title] / this[title] if less_is_more else this[title] / other[title]
            ratios[title].append(ratio)
            print(f"pair {number + 1}: {title}: {this[title]:.4g}, {other[title]:.4g}", flush=True)
    for title, found in ratios.items():
        span = f"{min(found):.2f} to {max(found):.2f}"
        print(f"{title}: {statistics.median(found):.3f} ({span}, {len(found)} pairs)")


if __name__ == "__main__":
    main()
