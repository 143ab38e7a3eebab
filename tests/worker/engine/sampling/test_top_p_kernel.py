"""The kernel of top_p in Triton's interpreter, or with TRITON_INTERPRET=0 on a GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.sampling.filters import FIRST_CANDIDATES, Filters, thresholds
from promptq.worker.engine.sampling.top_p_kernel import TILE, top_p_thresholds

LOWEST = -60.0
TOP_P = [0.0001, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0]


def check(logits: torch.Tensor, **others: float) -> int:
    """Compare with the sorted way, for each value of top_p. Gives how many tokens stay at most."""
    params = [SamplingParams(top_p=each, **others) for each in TOP_P]
    scaled = (logits - logits.max(dim=1, keepdim=True).values).repeat_interleave(len(params), 0)
    repeated = params * len(logits)
    asked = Filters(repeated, scaled.shape[1], torch.device("cpu"))
    expected = thresholds(scaled, asked, torch.empty_like(scaled))
    without = Filters(
        [each.model_copy(update={"top_p": 1.0}) for each in repeated],
        scaled.shape[1],
        torch.device("cpu"),
    )
    before = thresholds(scaled, without, torch.empty_like(scaled))
    if before is None:
        before = scaled.new_zeros(len(scaled), 1).log()
    top_p = torch.tensor([[each.top_p] for each in repeated], dtype=torch.float64)
    found = top_p_thresholds(scaled.to(DEVICE), before.to(DEVICE), top_p.to(DEVICE), LOWEST)
    assert expected is not None
    assert torch.equal(found.cpu(), expected)
    return int((scaled >= expected).sum(dim=1).max())


@pytest.mark.parametrize("vocab_size", [1, 7, 2 * TILE + 5])
@pytest.mark.parametrize("spread", [0.3, 30.0])
def test_finds_the_threshold_of_the_sorted_way(vocab_size: int, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocab_size, generator=generator) * spread
    num_kept = check(logits)
    if vocab_size > TILE and spread < 1:
        assert num_kept > FIRST_CANDIDATES  # so that the sorted way looked further


def test_after_other_filters(seed: int) -> None:
    logits = torch.randn(1, 900, generator=torch.Generator().manual_seed(seed)) * 3
    check(logits, min_p=0.01)
    check(logits, top_k=40)


def test_equal_logits_stay_or_go_together(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    check(torch.randint(0, 6, (1, 500), generator=generator).float())


def test_banned_tokens_have_no_weight(seed: int) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(seed))
    logits[:, ::3] = float("-inf")
    check(logits)
