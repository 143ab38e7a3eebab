"""Compares this checkout with another one, in alternating pairs.

The other checkout needs an environment (`make .venv/.set-up`). Both have a worker with a 54M model
on a server of their own all the time, and the same requests go to one and then to the other, the
first one changing. So what else the machine does hits both: a single request takes seconds, where a
run of the whole suite takes minutes. Nothing is drafted, as random weights repeat themselves. Each
ratio is this checkout's figure over the other's.
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
}

Figures = dict[str, float]


class Member:
    """One checkout's worker and client."""

    def __init__(self, checkout: Path, url: str, model: Path) -> None:
        environment = {**os.environ, "PROMPTQ_SPECULATIVE_TOKENS": "0"}
        environment.pop("PYTHONPATH", None)
        python = checkout / ".venv" / "bin" / "python"
        self.process = subprocess.Popen(
            [str(python), str(_MEMBER), url, str(model)],
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def ask(self, kind: str, seed: object) -> Figures:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind} {seed}\n")
        self.process.stdin.flush()
        told: Figures = json.loads(self._read())
        return told

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
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--solo", type=int, default=61, help="pairs of single requests")
    parser.add_argument("--burst", type=int, default=9, help="pairs of bursts of 64")
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
        for kind in (*_FIGURES, *_FIGURES):
            for member in members:
                member.ask(kind, "to warm up")
        for kind, count in (("solo", options.solo), ("burst", options.burst)):
            _tell(kind, _pairs(members, kind, count))


def _pairs(members: list[Member], kind: str, count: int) -> list[tuple[Figures, Figures]]:
    found = []
    for number in range(count):
        in_turn = members if number % 2 == 0 else members[::-1]
        told = {member: member.ask(kind, number) for member in in_turn}
        found.append((told[members[0]], told[members[1]]))
    return found


def _tell(kind: str, pairs: list[tuple[Figures, Figures]]) -> None:
    for name in _FIGURES[kind]:
        ratios = sorted(this[name] / other[name] for this, other in pairs)
        middle = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"
        medians = [statistics.median(it[name] for it in each) for each in zip(*pairs, strict=True)]
        print(
            f"{kind}, {name}: {statistics.median(ratios):.3f} (half of {len(ratios)} pairs:"
            f" {middle}); medians {medians[0]:.4g} and {medians[1]:.4g}",
            flush=True,
        )


if __name__ == "__main__":
    main()
