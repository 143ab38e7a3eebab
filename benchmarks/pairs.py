"""Compares this checkout with another one, in alternating pairs.

The other checkout needs an environment (`make .venv/.set-up`). Each checkout has one server, with a
worker of a 54M model and a worker without a model (for the queue alone), which stay up. The same
requests go to one checkout and then to the other, in alternating order, so other load of the
machine affects both. The rate of `poisson` is 0.4 of a burst's rate. Nothing is drafted, because
models with random weights repeat themselves. Each ratio is this checkout's figure divided by the
other's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from contextlib import ExitStack
from pathlib import Path

from benchmarks.lib.models import MODELS, model_dir
from promptq.shared.server.embedded import EmbeddedServer

_ROOT = Path(__file__).parent.parent
_MEMBER = _ROOT / "benchmarks" / "pair_member.py"
_FIGURES = {
    "solo": ("first_token_p50", "tokens_per_second"),
    "burst": ("first_token_p50", "first_token_p95", "tokens_per_second"),
    "poisson": ("first_token_p50", "first_token_p95"),
    "queue": ("requests_per_second",),
}
_POISSON_LOAD = 0.4

Figures = dict[str, float]


class Member:
    """One checkout's workers and client, as processes."""

    def __init__(self, checkout: Path, url: str, model: Path) -> None:
        environment = {**os.environ, "PROMPTQ_SPECULATIVE_TOKENS": "0"}
        environment.pop("PYTHONPATH", None)
        python = checkout / ".venv" / "bin" / "python"
        self.process = subprocess.Popen(
            [str(python), "-P", str(_MEMBER), url, str(model)],
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def measure(self, workload: str, *arguments: object) -> Figures:
        assert self.process.stdin is not None
        print(workload, *arguments, file=self.process.stdin, flush=True)
        figures: Figures = json.loads(self._read())
        return figures

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended")
        return line


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pairs", description=__doc__)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--solo", type=int, default=61, help="number of pairs of single requests")
    parser.add_argument("--burst", type=int, default=9, help="number of pairs of bursts of 64")
    parser.add_argument(
        "--poisson", type=int, default=7, help="pairs with arrivals at random times"
    )
    parser.add_argument("--queue", type=int, default=9, help="pairs of 10,000 one-token requests")
    parser.add_argument("--cache", type=Path, default=_ROOT / "benchmarks" / ".cache")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    model = model_dir(MODELS["54m"], options.cache.resolve())
    with ExitStack() as stack:
        members: list[Member] = []
        for checkout in (_ROOT, options.other.resolve()):
            server = stack.enter_context(EmbeddedServer())
            members.append(Member(checkout, server.url, model))
            stack.callback(members[-1].close)
        rate = _warm_up(members)
        for workload in _FIGURES:
            arguments = [rate] if workload == "poisson" else []
            if count := getattr(options, workload):
                _print(workload, _pairs(members, workload, count, *arguments))


def _warm_up(members: list[Member]) -> float:
    """Measures each workload twice. Returns the requests per second of `poisson`."""
    for workload in ("solo", "burst", "queue") * 2:
        rates = [member.measure(workload, "warm-up")["requests_per_second"] for member in members]
        if workload == "burst":
            rate = _POISSON_LOAD * min(rates)
    return rate


def _pairs(
    members: list[Member], workload: str, count: int, *arguments: float
) -> list[tuple[Figures, Figures]]:
    pairs = []
    for number in range(count):
        in_turn = members if number % 2 == 0 else members[::-1]
        figures = {member: member.measure(workload, number, *arguments) for member in in_turn}
        pairs.append((figures[members[0]], figures[members[1]]))
    return pairs


def _print(workload: str, pairs: list[tuple[Figures, Figures]]) -> None:
    for name in _FIGURES[workload]:
        ratios = sorted(this[name] / other[name] for this, other in pairs)
        middle = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"
        medians = [
            statistics.median(figures[name] for figures in side)
            for side in zip(*pairs, strict=True)
        ]
        print(
            f"{workload}, {name}: {statistics.median(ratios):.3f} (half of {len(ratios)} pairs:"
            f" {middle}); medians {medians[0]:.4g} and {medians[1]:.4g}",
            flush=True,
        )


if __name__ == "__main__":
    main()
