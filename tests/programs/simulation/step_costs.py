"""The time of an engine's step by its number of tokens, as measured with the shipped model.

To measure the times again, run `OMP_NUM_THREADS=1 python -m tests.programs.simulation.step_costs`.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from functools import cache
from itertools import pairwise

MEASURED = (
    (1, 0.00112),
    (2, 0.00115),
    (4, 0.001251),
    (8, 0.001232),
    (16, 0.001798),
    (32, 0.00246),
    (64, 0.003893),
)
"""Pairs of a number of tokens and CPU seconds, with one thread (2026-11-30, fp32)."""


@cache
def step_seconds(num_tokens: int) -> float:
    """Returns the seconds of a step with this number of tokens, interpolated between measured steps
    and extrapolated beyond them."""
    sizes = [size for size, _ in MEASURED]
    at = min(max(1, bisect_left(sizes, num_tokens)), len(MEASURED) - 1)
    (size, seconds), (next_size, next_seconds) = list(pairwise(MEASURED))[at - 1]
    return seconds + (next_seconds - seconds) * (num_tokens - size) / (next_size - size)


def main() -> None:
    """Print a table for `MEASURED`: the shortest time of many prefills of each size."""
    from promptq.shared.protocol.request import SamplingParams
    from promptq.shared.settings.worker import read_worker_settings
    from promptq.worker.engine.api.messages import EngineRequest
    from promptq.worker.serve.build import build

    sizes = [1, 2, 4, 8, 16, 32, 64]
    settings = read_worker_settings(dtype="float32", max_num_seqs=8, kv_cache_memory="64M")
    engine = build(settings).engine
    seconds = dict.fromkeys(sizes, float("inf"))
    for number in range(40 * len(sizes)):
        size = sizes[number % len(sizes)]
        prompt = [random.randint(1, 200) for _ in range(size)]
        engine.add(EngineRequest(number, prompt, SamplingParams(), seed=0, max_tokens=1))
        began_at = time.process_time()
        engine.step()
        seconds[size] = min(seconds[size], time.process_time() - began_at)
    print(tuple((size, round(least, 6)) for size, least in seconds.items()))


if __name__ == "__main__":
    main()
