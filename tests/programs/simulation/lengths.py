"""Judges `shortest_first_ms` in the simulated world: latencies, as shares of the latencies in order
of arrival.

`python -m tests.programs.simulation.lengths --seed 1000` prints the table of held-out seeds. The
lengths of outputs are heavy-tailed, and the queue does not know them: a stop string ends each
output, far below its `max_tokens`. A request's expected length is a mean of two lengths: its true
length, with the weight `predictability`, and the length of some other output.

With `--learned`, the clients guess as a gateway does that has learned from 200 earlier outputs.
Words of the prompts decide a part of the outputs' logarithms (the predictability; the rest is
chance). Each row ends with the correlation of guesses and outputs.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from tests.programs.simulation import clock

if __name__ == "__main__":
    clock.install()  # before the modules of promptq are imported

import redis

from promptq.producer.calls.output_lengths import OutputLengths, _Model, features_of
from promptq.producer.clients.async_client import AsyncClient
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import NewRequest, Request
from promptq.shared.queue.call import carry_out_async
from promptq.shared.settings.worker import WorkerSettings
from tests.programs.chaos.audit.outcome import take_snapshot
from tests.programs.chaos.audit.records import Kind
from tests.programs.simulation import fleet, world
from tests.programs.simulation.__main__ import send_logs_to_story
from tests.programs.simulation.fleet_costs import Equal
from tests.programs.simulation.loop import PROCESS
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
_NUM_WORDS = 12
"""Words of each of two kinds, one of which a prompt has. Their effects are a normal distribution's
quantiles."""
_NUM_OTHER_WORDS, _NUM_OTHERS = 300, 6
_LEARN_SECONDS = 1.0
_NUM_EARLIER = 200

Latencies = Sequence[tuple[int, float]]
"""For each request, the tokens of its output, and the seconds from its arrival to its end."""


class Judged(NamedTuple):
    """A run's latencies, and the correlation of learned guesses; NaN without."""

    latencies: Latencies
    correlation: float


def _output(rng: random.Random) -> int:
    return _length(rng.lognormvariate(0, _SIGMA))


def _length(medians: float) -> int:
    return max(_LETTERS, min(_LONGEST, round(medians * _MEDIAN)))


def _prompt(rng: random.Random, predictability: float) -> tuple[str, int]:
    """Returns a prompt, and the tokens of its output."""
    words = [rng.randrange(_NUM_WORDS) for _ in range(2)]
    known = sum(statistics.NormalDist().inv_cdf((word + 0.5) / _NUM_WORDS) for word in words)
    known /= math.sqrt(2)
    others = (f"o{rng.randrange(_NUM_OTHER_WORDS)}" for _ in range(_NUM_OTHERS))
    chance = math.sqrt(1 - predictability**2) * rng.gauss(0, 1)
    prompt = " ".join((f"a{words[0]}", f"b{words[1]}", *others))
    return prompt, _length(math.exp(_SIGMA * (predictability * known + chance)))


@contextmanager
def _guessing(seed: int, predictability: float, guesses: dict[str, int]) -> Iterator[None]:
    """Lets clients guess as gateways do, and records their guesses."""
    lengths, learned_at = OutputLengths(), 0.0
    lengths._models[""] = model = _Model()
    rng = random.Random(f"{seed} earlier")
    for _ in range(_NUM_EARLIER):
        prompt, length = _prompt(rng, predictability)
        model.learn(features_of(Request(prompt=prompt, max_tokens=2 * _LONGEST)), length)
    enqueue = AsyncClient.enqueue_composed

    async def enqueue_composed(client: AsyncClient, new: list[NewRequest]) -> list[str]:
        nonlocal learned_at
        now = PROCESS.get().loop.now
        if now > learned_at + _LEARN_SECONDS:
            learned_at = now
            await carry_out_async(lengths.learn(client.queue.keys), client.queue.run)
        new = lengths.with_guesses(new, ())
        found = {each.request_id: each.request.expected_tokens for each in new}
        guesses.update({name: guess for name, guess in found.items() if guess is not None})
        return await enqueue(client, new)

    with patch.object(AsyncClient, "enqueue_composed", enqueue_composed):
        yield


class LengthsWorld(world.World):
    """A world of one worker, without faults."""

    most_callbacks = 10**9

    def __init__(
        self, plan: Plan, server: ServerProcess, predictability: float, is_learned: bool
    ) -> None:
        with patch.object(fleet, "SIZES", _SIZES):
            super().__init__(plan, server, None, None)
        for place in self._fleet.workers:
            place.make_random = Equal
        rng = random.Random(f"{plan.seed} lengths")
        self.lengths: dict[str, int] = {}
        [work] = self._fleet.work
        for sent in work.requests:
            if is_learned:
                prompt, length = _prompt(rng, predictability)
            else:
                prompt, length, noise = "Once", _output(rng), _output(rng)
            self.lengths[sent.request_id] = length
            seed = rng.randrange(2**31)
            stop = bytes(tokens_of(seed, length)[-_LETTERS:]).decode()
            sent.kind, sent.delay_ms = Kind.PLAIN, 0
            sent.fields = {
                "prompt": prompt, "seed": seed, "stop": stop, "max_tokens": 2 * _LONGEST,
            }  # fmt: skip
            if not is_learned:
                expected = round(predictability * length + (1 - predictability) * noise)
                sent.fields["expected_tokens"] = expected

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
    is_learned: bool,
    library: Path,
) -> Judged:
    guesses: dict[str, int] = {}
    seconds = num_requests / (load * _CAPACITY) / _SHARE_OF_SPAN
    lease_ms = WorkerSettings().lease_ms
    plan = Plan(seed, 1, 1, num_requests, seconds, (), lease_ms, shortest_first_ms=setting_ms)
    with (
        tempfile.TemporaryDirectory(prefix="lengths-") as folder,
        ServerProcess(Path(folder), library) as server,
        _guessing(seed, predictability, guesses) if is_learned else nullcontext(),
    ):
        judged = LengthsWorld(plan, server, predictability, is_learned)
        try:
            found = [each for each in judged.run().violations if each.rule != "idle"]
            if found:  # the rule `idle` assumes shorter requests
                raise RuntimeError(f"seed {seed}: {found[0]}")
            pairs = [
                (guess, judged.lengths[name])
                for name, guess in guesses.items()
                if name in judged.lengths
            ]
            correlation = statistics.correlation(*zip(*pairs, strict=True)) if pairs else math.nan
            return Judged(judged.latencies(), correlation)
        finally:
            judged.close()


def _row(by_arrival: Sequence[Judged], judged: Sequence[Judged]) -> str:
    pairs = [
        (one.latencies, other.latencies) for one, other in zip(by_arrival, judged, strict=True)
    ]
    correlation = statistics.mean(each.correlation for each in judged)
    learned = "" if math.isnan(correlation) else f" {correlation:.2f} |"
    return f"{_ratios(pairs)} |{learned}"


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
    parser.add_argument("--learned", action="store_true")
    arguments = parser.parse_args()
    send_logs_to_story(False)
    gc.collect()
    gc.freeze()
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder))
        for load in arguments.loads:
            run = partial(
                _run,
                load=load,
                num_requests=arguments.requests,
                is_learned=arguments.learned,
                library=library,
            )
            for predictability in arguments.predictabilities:
                by_arrival = [
                    run(seed, setting_ms=0, predictability=predictability) for seed in seeds
                ]
                for setting_ms in arguments.setting_ms:
                    judged = [
                        run(seed, setting_ms=setting_ms, predictability=predictability)
                        for seed in seeds
                    ]
                    print(
                        f"| {load} | {setting_ms} | {predictability} | {_row(by_arrival, judged)}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
