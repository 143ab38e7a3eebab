"""The kernel that chooses tokens in Triton's interpreter, or with TRITON_INTERPRET=0 on a GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
CPU = torch.device("cpu")
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.sampling.filters import FILTERS, FIRST_CANDIDATES
from promptq.worker.engine.sampling.temperature_and_choice import Distributions, TorchKernels
from promptq.worker.engine.sampling.triton_choice import TILE, choose_tokens

TOP_P = [0.0001, 0.9, 0.999]


def choose(
    logits: torch.Tensor, params: list[SamplingParams], numbers: list[float]
) -> tuple[list[int], list[int]]:
    """Returns the choices of the kernel and of torch from one row of logits, for each of the
    params.
    """
    repeated = logits.expand(len(params), -1)
    asked = Distributions(params, logits.shape[1], CPU)
    draws = torch.from_numpy(asked.draws.copy())
    draws[0] = torch.tensor(numbers)
    found, is_sound = choose_tokens(repeated.to(DEVICE), draws.to(DEVICE))
    expected, is_sound_there = TorchKernels(CPU).choose(repeated, asked, draws)
    assert torch.equal(is_sound.cpu(), is_sound_there)
    return found.tolist(), expected.tolist()


def assert_chooses_as_torch(logits: torch.Tensor, **others: float) -> int:
    """In ascending order, the first token that stays is that of the sorted way, for each top_p.
    Gives how many tokens stay at most."""
    ascending = logits.sort(dim=1).values
    params = [SamplingParams(top_p=each, **others) for each in TOP_P]
    found, expected = choose(ascending, params, [0.0] * len(TOP_P))
    assert found == expected
    return logits.shape[1] - min(found)


@pytest.mark.parametrize("vocab_size", [1, 7, 2 * TILE + 5])
@pytest.mark.parametrize("spread", [0.3, 30.0])
def test_the_sorted_way_keeps_the_same_tokens(vocab_size: int, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_kept = assert_chooses_as_torch(torch.randn(1, vocab_size, generator=generator) * spread)
    if vocab_size > TILE and spread < 1:
        assert num_kept > FIRST_CANDIDATES  # so that the sorted way looked further


def test_filters_together(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 700, generator=generator) * 3
    assert_chooses_as_torch(logits, min_p=0.01)
    assert_chooses_as_torch(logits, top_k=40)
    assert_chooses_as_torch(logits, top_k=3, min_p=0.2, temperature=1.5)
    assert_chooses_as_torch(logits.bfloat16(), top_k=5)
    assert_chooses_as_torch(logits.half(), top_k=5)


def test_equal_logits_stay_or_go_together(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 6, (1, 500), generator=generator).float()
    assert_chooses_as_torch(logits)
    assert_chooses_as_torch(logits, top_k=7)


def test_banned_tokens_are_never_chosen(seed: int) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(seed))
    logits[:, ::3] = float("-inf")
    logits[:, -1] = float("-inf")
    assert_chooses_as_torch(logits)
    assert_chooses_as_torch(logits, top_k=250)


VALUES: dict[str, list[Any]] = {"min_p": [0.02, 0.5], "top_k": [1, 9, 80], "top_p": [0.2, 0.9]}


def random_params(random: Random) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": random.choice([0.0, 0.3, 1.0, 1.7])}
    for name, values in VALUES.items():
        if random.random() < 0.5:
            fields[name] = random.choice(values)
    return SamplingParams(**fields)


@pytest.mark.parametrize("name", FILTERS)
def test_the_kernel_knows_every_filter(name: str, seed: int) -> None:
    """In ascending order, the first token that stays shows how many it leaves out."""
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(seed)).sort(dim=1).values
    params = [SamplingParams(**{name: value}) for value in VALUES[name]]
    found, expected = choose(logits, params, [0.0] * len(params))
    assert found == expected
    assert min(found) > 0


def test_draws_as_torch_does(seed: int) -> None:
    """Beside each other, rows of any parameters. Rounding may move the border of a token."""
    random = Random(seed)
    logits = torch.randn(1, TILE + 300, generator=torch.Generator().manual_seed(seed)) * 2
    params = [random_params(random) for _ in range(20)]
    found, expected = choose(logits, params, [random.random() for _ in params])
    assert sum(one != other for one, other in zip(found, expected, strict=True)) <= 1


def test_a_row_is_chosen_alike_alone_and_beside_others(seed: int) -> None:
    random = Random(seed)
    logits = torch.randn(5, TILE + 300, generator=torch.Generator().manual_seed(seed))
    asked = Distributions([random_params(random) for _ in logits], logits.shape[1], CPU)
    draws = torch.from_numpy(asked.draws.copy()).to(DEVICE)
    draws[0] = torch.from_numpy(np.random.default_rng(seed).random(5))
    together, _ = choose_tokens(logits.to(DEVICE), draws)
    for row in range(len(logits)):
        rows = slice(row, row + 1)
        alone, _ = choose_tokens(logits[rows].to(DEVICE), draws[:, rows].contiguous())
        assert torch.equal(alone, together[rows])


def test_rows_without_a_choice_are_reported_and_get_some_token() -> None:
    nothing = torch.full((1, 40), float("-inf"))
    broken = torch.full((1, 40), float("nan"))
    for logits in (nothing, broken):
        draws = torch.from_numpy(Distributions([SamplingParams(top_k=3)], 40, CPU).draws)
        token_ids, is_sound = choose_tokens(logits.to(DEVICE), draws.to(DEVICE))
        assert 0 <= int(token_ids) < 40
        assert not is_sound.item()
