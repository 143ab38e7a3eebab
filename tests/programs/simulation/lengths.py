"""Judges `shortest_first_ms` in the simulated world: latencies, as shares of the latencies in order
of arrival.

`python -m tests.programs.simulation.lengths --seed 1000` prints the table of held-out seeds. The
lengths of outputs are heavy-tailed, and the queue does not know them: a stop string ends each
output, far below its `max_tokens`. A request's expected length is a mean of two lengths: its true
length, with the weight `predictability`, and the length of some other output.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

from tests.programs.simulation import clock

if __name__ == "__main__":
    clock.install()  # before the modules of promptq are imported

import redis

from promptq.shared.protocol.keys import Keys
from promptq.shared.settings.worker import WorkerSettings
from tests.programs.chaos.audit.outcome import take_snapshot
from tests.programs.chaos.audit.records import Kind
from tests.programs.simulation import fleet, world
from tests.programs.simulation.__main__ import send_logs_to_story
from tests.programs.simulation.fleet_costs import Equal
from tests.programs.simulation.plan import Plan
from tests.programs.simulation.processes import QUEUE
from tests.programs.simulation.server import ServerProcess, compile_library
from tests.support.model_free import tokens_of

_MEDIAN, _SIGMA, _LONGEST = 20, 1.4, 1000
"""Tokens of outputs: a lognormal distribution, fixed before any tuning."""
_SIZES = ((8, 2000),)
"""Slots and KV blocks of the worker."""
_NUM_REQUESTS = 400
_CAPACITY = 118
"""Requests that the worker serves in a second."""
_SHARE_OF_SPAN = 0.81
"""Part of a plan's seconds in which a client sends its requests, in bursts."""
SETTING_MS = 500
"""The setting that is judged, chosen with the seeds 0 and 1 from 150, 300 and 500."""
_LETTERS = 6  # of a stop string, which no output has earlier
LOADS = (0.7, 0.9, 1.2)
PREDICTABILITIES = (0.0, 0.7, 1.0)

Latencies = Sequence[tuple[int, float]]
"""For each request, the tokens of its output, and the seconds from its arrival to its end."""


def _output(rng: random.Random) -> int:
    return max(_LETTERS, min(_LONGEST, round(rng.lognormvariate(0, _SIGMA) * _MEDIAN)))


class LengthsWorld(world.World):
    """A world of one worker, without faults."""

    most_callbacks = 10**9

    def __init__(self, plan: Plan, server: ServerProcess, predictability: float) -> None:
        with patch.object(fleet, "SIZES", _SIZES):
            super().__init__(plan, server, None, None)
        for place in self._fleet.workers:
            place.make_random = Equal
        rng = random.Random(f"{plan.seed} lengths")
        self.lengths: dict[str, int] = {}
        [work] = self._fleet.work
        for sent in work.requests:
            length, noise = _output(rng), _output(rng)
            self.lengths[sent.request_id] = length
            seed = rng.randrange(2**31)
            stop = bytes(tokens_of(seed, length)[-_LETTERS:]).decode()
            expected = round(predictability * length + (1 - predictability) * noise)
            sent.kind, sent.delay_ms = Kind.PLAIN, 0
            sent.fields = {
                "prompt": "Once", "seed": seed, "stop": stop, "max_tokens": 2 * _LONGEST,
                "expected_tokens": expected,
            }  # fmt: skip

    def latencies(self) -> Latencies:
        with redis.Redis(unix_socket_path=str(self._server_process.path)) as connection:
            found = take_snapshot(connection, Keys(QUEUE)).requests
        return [
            (length, (int(found[name]["finished_at"]) - int(found[name]["enqueued_at"])) / 1000)
            for name, length in self.lengths.items()
        ]


def _run(
    seed: int,
    *,
    load: float,
    num_requests: int,
    setting_ms: int,
    predictability: float,
    library: Path,
) -> Latencies:
    seconds = num_requests / (load * _CAPACITY) / _SHARE_OF_SPAN
    lease_ms = WorkerSettings().lease_ms
    plan = Plan(seed, 1, 1, num_requests, seconds, (), lease_ms, shortest_first_ms=setting_ms)
    with (
        tempfile.TemporaryDirectory(prefix="lengths-") as folder,
        ServerProcess(Path(folder), library) as server,
    ):
        judged = LengthsWorld(plan, server, predictability)
        try:
            found = [each for each in judged.run().violations if each.rule != "idle"]
            if found:  # the rule `idle` assumes shorter requests
                raise RuntimeError(f"seed {seed}: {found[0]}")
            return judged.latencies()
        finally:
            judged.close()


def _ratios(runs: Iterable[tuple[Latencies, Latencies]]) -> str:
    """Returns mean latency, short requests' median and p99, in parts of those by arrival."""
    pairs = [*zip(*runs, strict=True)]
    by_arrival, shortest_first = ([latency for run in kind for latency in run] for kind in pairs)
    figures = zip(_figures(shortest_first), _figures(by_arrival), strict=True)
    return ", ".join(f"{one / other:.2f}" for one, other in figures)


def _figures(latencies: Latencies) -> tuple[float, float, float]:
    seconds = [each for _, each in latencies]
    short = statistics.median(each for length, each in latencies if length <= _MEDIAN)
    return statistics.mean(seconds), short, statistics.quantiles(seconds, n=100)[98]


def main() -> None:
    """Print a row for each load. A row has three figures for each predictability."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--setting-ms", type=int, nargs="+", default=[SETTING_MS])
    parser.add_argument("--requests", type=int, default=_NUM_REQUESTS)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--predictabilities", type=float, nargs="+", default=PREDICTABILITIES)
    arguments = parser.parse_args()
    send_logs_to_story(False)
    gc.collect()
    gc.freeze()
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder))
        for load in arguments.loads:
            run = partial(_run, load=load, num_requests=arguments.requests, library=library)
            by_arrival = [run(seed, setting_ms=0, predictability=0.0) for seed in seeds]
            for setting_ms in arguments.setting_ms:
                for predictability in arguments.predictabilities:
                    judged = [
                        run(seed, setting_ms=setting_ms, predictability=predictability)
                        for seed in seeds
                    ]
                    ratios = _ratios(zip(by_arrival, judged, strict=True))
                    print(f"| {load} | {setting_ms} | {predictability} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
