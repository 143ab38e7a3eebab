"""The requests of each workload, from a seed alone.

Each workload draws its tokens from a seed that differs between workloads and rounds. So the prefix
cache of an engine never has the tokens of an earlier measurement.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from benchmarks.lib.models import VOCAB_SIZE, Shape
from benchmarks.table.jobs import Request, Workload

FLOOR_LENGTH = 250
"""Mean length of the sequences of which a decode step's floor is printed."""
SHARED_PREFIX, OWN_PROMPT, NUM_SHARING = 1024, 32, 32


def warm_up(shape: Shape, seed: int) -> Workload:
    """Returns a few requests of each kind, so that engines build all parts before the
    measurement."""
    draw = random.Random(f"warm-up {seed}")
    sizes = [(_tokens(draw, draw.randint(32, 256)), 12) for _ in range(shape.batch)]
    return Workload("warm-up", [Request(prompt, num_output) for prompt, num_output in sizes])


def burst(shape: Shape, seed: int, tokens: str = "") -> Workload:
    """Returns a full batch of requests, all at once. The lengths do not depend on `tokens`."""
    sizes = f"burst {seed}"
    return Workload("burst", _mixed(shape.batch, sizes + tokens, sizes))


def solo(shape: Shape, seed: int) -> Workload:
    """Returns one request."""
    draw = random.Random(f"solo {seed}")
    return Workload("solo", [Request(_tokens(draw, 128), 256)])


def prompt(shape: Shape, seed: int) -> Workload:
    """Returns one request with a prompt of 1,024 tokens and one output token."""
    draw = random.Random(f"prompt {seed}")
    return Workload("prompt", [Request(_tokens(draw, 1024), 1)])


def poisson(seed: int, rate: float, seconds: float) -> Workload:
    """Returns requests like those of the burst that arrive at random: `rate` a second for
    `seconds`."""
    draw = random.Random(f"arrivals {seed}")
    arrivals = []
    at = draw.expovariate(rate)
    while at < seconds:
        arrivals.append(at)
        at += draw.expovariate(rate)
    requests = _mixed(len(arrivals), f"poisson {seed}")
    return Workload(
        "poisson",
        [
            Request(each.prompt, each.num_output, at=at)
            for each, at in zip(requests, arrivals, strict=True)
        ],
    )


def shared_prefix(shape: Shape, seed: int) -> Workload:
    """Returns requests whose prompts share their first tokens."""
    draw = random.Random(f"shared prefix {seed}")
    prefix = _tokens(draw, SHARED_PREFIX)
    prompts = [prefix + _tokens(draw, OWN_PROMPT) for _ in range(NUM_SHARING)]
    return Workload("shared-prefix", [Request(prompt, 32) for prompt in prompts])


WORKLOADS: dict[str, Callable[[Shape, int], Workload]] = {
    "burst": burst,
    "solo": solo,
    "prompt": prompt,
    "shared-prefix": shared_prefix,
}
"""Workloads that need only a seed; `poisson` needs a rate, which the others measure."""


def shortened(workload: Workload, times: int) -> Workload:
    """Returns the workload with outputs of 1 / `times` the length, at least one token each."""
    requests = [replace(it, num_output=max(1, it.num_output // times)) for it in workload.requests]
    return Workload(workload.name, requests)


def _mixed(count: int, seed: str, sizes: str | None = None) -> list[Request]:
    """Prompts of 32 to 256 tokens, outputs of 32 to 192. `sizes` is the seed of the lengths."""
    lengths, draw = random.Random(sizes or seed), random.Random(f"tokens of {seed}")
    drawn = [(lengths.randint(32, 256), lengths.randint(32, 192)) for _ in range(count)]
    return [Request(_tokens(draw, prompt), output) for prompt, output in drawn]


def _tokens(draw: random.Random, count: int) -> list[int]:
    """Draws tokens except the first, which ends texts."""
    return [draw.randint(1, VOCAB_SIZE - 1) for _ in range(count)]
