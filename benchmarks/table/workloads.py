"""The requests of each workload, from a seed alone.

Each workload draws its tokens from a seed that differs between workloads and rounds. Engines with a
prefix cache use it, and must not find the tokens of an earlier measurement.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from benchmarks.lib.models import VOCAB_SIZE, Shape
from benchmarks.table.jobs import Request, Workload

END_TOKEN = VOCAB_SIZE - 1
LOOSE_LIMIT = 1024
FLOOR_LENGTH = 250
"""Mean length of the sequences while the decode step is compared with its floor."""
SHARED_PREFIX, OWN_PROMPT, NUM_SHARING = 1024, 32, 32
_STREAMS, _GUEST_PROMPT = 16, 3000


def warm_up(shape: Shape, seed: int) -> Workload:
    """A few requests of each kind, so that parts that are built at first use are built."""
    draw = random.Random(f"warm-up {seed}")
    sizes = [(_tokens(draw, draw.randint(32, 256)), 12) for _ in range(shape.batch)]
    return Workload("warm-up", [Request(prompt, num_output) for prompt, num_output in sizes])


def burst(shape: Shape, seed: int, tokens: str = "") -> Workload:
    """A full batch of requests, all at once. The lengths do not depend on `tokens`."""
    sizes = f"burst {seed}"
    return Workload("burst", _mixed(shape.batch, sizes + tokens, sizes))


def solo(shape: Shape, seed: int) -> Workload:
    """One request alone."""
    draw = random.Random(f"solo {seed}")
    return Workload("solo", [Request(_tokens(draw, 128), 256)])


def prompt(shape: Shape, seed: int) -> Workload:
    """One prompt of 1,024 tokens, and its first token."""
    draw = random.Random(f"prompt {seed}")
    return Workload("prompt", [Request(_tokens(draw, 1024), 1)])


def poisson(seed: int, rate: float, seconds: float) -> Workload:
    """Requests like those of the burst, arriving at random: `rate` a second for `seconds`."""
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


def long_guest(shape: Shape, seed: int) -> Workload:
    """A long prompt arrives while others decode. The guest is the last request."""
    draw = random.Random(f"long guest {seed}")
    others = [Request(_tokens(draw, draw.randint(32, 64)), 320) for _ in range(_STREAMS)]
    return Workload("long-guest", [*others, Request(_tokens(draw, _GUEST_PROMPT), 32, after=64)])


def shared_prefix(shape: Shape, seed: int) -> Workload:
    """Prompts that share their first tokens."""
    draw = random.Random(f"shared prefix {seed}")
    prefix = _tokens(draw, SHARED_PREFIX)
    prompts = [prefix + _tokens(draw, OWN_PROMPT) for _ in range(NUM_SHARING)]
    return Workload("shared-prefix", [Request(prompt, 32) for prompt in prompts])


def tight(shape: Shape, seed: int) -> Workload:
    """The burst with exact `max_tokens`, sampled like `loose`, for comparison with `loose`."""
    return _ending("tight", shape, seed, limit=None)


def loose(shape: Shape, seed: int) -> Workload:
    """The burst with `max_tokens` far above the number of tokens after which the requests end."""
    return _ending("loose", shape, seed, limit=LOOSE_LIMIT)


def step(shape: Shape, seed: int) -> Workload:
    """A full batch that decodes around one median length, to compare its steps with their floor.
    Outputs are long, so prompts are computed in few steps only."""
    draw = random.Random(f"step {seed}")
    num_output = 301
    prompt_length = FLOOR_LENGTH - num_output // 2
    prompts = [_tokens(draw, prompt_length) for _ in range(shape.batch)]
    return Workload("step", [Request(prompt, num_output) for prompt in prompts])


WORKLOADS: dict[str, Callable[[Shape, int], Workload]] = {
    "burst": burst,
    "solo": solo,
    "prompt": prompt,
    "shared-prefix": shared_prefix,
    "long-guest": long_guest,
    "tight": tight,
    "loose": loose,
    "step": step,
}
"""Workloads that need only a seed; `poisson` needs a rate, which the others measure."""


def shortened(workload: Workload, times: int) -> Workload:
    """Returns the workload with outputs of 1 / `times` the length, each at least a token."""
    requests = [replace(it, num_output=max(1, it.num_output // times)) for it in workload.requests]
    return Workload(workload.name, requests)


def _ending(name: str, shape: Shape, seed: int, limit: int | None) -> Workload:
    return Workload(
        name,
        [
            Request(each.prompt, each.num_output, limit=limit, end_token=END_TOKEN)
            for each in _mixed(shape.batch, f"{name} {seed}", sizes=f"loose {seed}")
        ],
    )


def _mixed(count: int, seed: str, sizes: str | None = None) -> list[Request]:
    """Prompts of 32 to 256 tokens, outputs of 32 to 192. `sizes` is the seed of the lengths."""
    lengths, draw = random.Random(sizes or seed), random.Random(f"tokens of {seed}")
    drawn = [(lengths.randint(32, 256), lengths.randint(32, 192)) for _ in range(count)]
    return [Request(_tokens(draw, prompt), output) for prompt, output in drawn]


def _tokens(draw: random.Random, count: int) -> list[int]:
    """Draws tokens except the first, which ends texts, and the last, which ends loose requests."""
    return [draw.randint(1, VOCAB_SIZE - 2) for _ in range(count)]
