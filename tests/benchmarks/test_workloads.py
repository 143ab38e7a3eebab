"""Workloads come from their seed alone, and are what their names say."""

import pytest

from benchmarks.lib.models import MODELS, VOCAB_SIZE, Shape
from benchmarks.table import workloads
from benchmarks.table.workloads import WORKLOADS


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_the_same_requests_again(name: str, shape: Shape) -> None:
    workload = WORKLOADS[name](shape, 5)
    assert workload.name == name
    assert workload == WORKLOADS[name](shape, 5)
    assert workload != WORKLOADS[name](shape, 6)
    tokens = [token for request in workload.requests for token in request.prompt]
    assert min(tokens) > 0
    assert max(tokens) < VOCAB_SIZE


def test_the_burst_fills_the_batch_with_the_lengths_it_promises() -> None:
    requests = workloads.burst(MODELS["54m"], 0).requests
    assert len(requests) == 64
    assert all(32 <= len(request.prompt) <= 256 for request in requests)
    assert all(32 <= request.num_output <= 192 for request in requests)


def test_prompts_of_the_shared_prefix_are_alike_for_its_length_alone() -> None:
    prompts = [request.prompt for request in workloads.shared_prefix(MODELS["54m"], 3).requests]
    assert sum(len(prompt) for prompt in prompts) == 33_792
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("seed", range(3))
def test_poisson_arrives_in_order_at_about_its_rate(seed: int) -> None:
    requests = workloads.poisson(seed, rate=9.0, seconds=200.0).requests
    arrivals = [request.at for request in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < 200.0
    assert len(arrivals) == pytest.approx(1800, rel=0.1)  # its deviation is 42
