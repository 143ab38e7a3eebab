"""The warm-up launches every variant of the kernels that later steps launch."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("triton") is None or os.environ["TRITON_INTERPRET"] != "1":
    pytest.skip("triton's interpreter is not used here", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.decoders.kernels.fused import FusedDecoder
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.quantization.modules import quantize_model
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.engine.runner.trial_steps import (
    Shares,
    kinds_of_steps,
    largest_step,
    most_padded_step,
    powers_of_two,
    trial_batch,
)
from promptq.worker.engine.runner.warm_up import warm_up_kinds
from tests.worker.engine.tiny_models import check_on_torch, make_model

CPU = torch.device("cpu")
LENGTH, TOKENS, SEQUENCES = 1100, 300, 40


class Launches:
    """Records the variants that are launched, and computes nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.variants: set[Any] = set()

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            plain = kernel.kwargs.get("do_not_specialize") or ()
            self.variants.add(
                (
                    kernel.__name__,
                    *((name, _kind(value, name, plain)) for name, value in sorted(named.items())),
                )
            )

        monkeypatch.setattr(InterpretedFunction, "run", run)

    def take(self) -> set[Any]:
        taken, self.variants = self.variants, set()
        return taken


def _kind(value: Any, name: str, plain: Any) -> Any:
    """Returns the values by which Triton chooses a variant: a constant's value, and whether an
    argument is one or a multiple of 16.
    """
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.data_ptr() % 16 == 0)
    if name.isupper() or name in ("num_warps", "num_stages"):
        return value
    if isinstance(value, int) and name not in plain:
        return (value == 1, value % 16 == 0)
    return type(value)


def make_runner(family: str, bits: int | None = None) -> ModelRunner:
    # All strides of a real model are multiples of 16, as with these heads.
    model = make_model(family, 7, max_position_embeddings=LENGTH, head_dim=16)
    model.requires_grad_(False)
    loaded = LoadedModel(family, model, frozenset())
    checked = check_on_torch(loaded, TritonPaged(), LENGTH)
    if bits is not None:
        checked = replace(checked, decoder=FusedDecoder, why_no_own_code="")
        quantize_model(model.bfloat16(), bits, 32, embeddings=True)
    cache = KVCache(checked.specs, num_blocks=100, block_size=16, device=CPU)
    options = LoadOptions(native=False, max_num_seqs=SEQUENCES)
    return ModelRunner(loaded, checked, cache, LENGTH, options, native_sampling=False)


def random_step(chance: random.Random) -> Shares:
    left, shares, is_mixed = TOKENS, [], chance.random() < 0.5
    for _ in range(chance.randint(1, SEQUENCES)):
        context = int(2 ** chance.uniform(0, 10.1))
        rows = (
            1
            if not is_mixed or chance.random() < 0.6
            else min(context, int(2 ** chance.uniform(0, 8.2)))
        )
        if left < rows:
            break
        left -= rows
        shares.append((context, rows))
    return shares


@pytest.mark.parametrize(("family", "bits"), [("qwen3", None), ("gpt_oss", None), ("qwen3", 4)])
def test_no_later_step_launches_another_variant(
    family: str, bits: int | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(family, bits)
    launches = Launches(monkeypatch)
    warm_up_kinds(runner, TOKENS, SEQUENCES)
    warm = launches.take()
    assert len(warm) >= 4  # writes, decodes, and several tiles of chunks
    if bits is not None:
        assert {"_product_kernel", "_widen_kernel"} < {name for name, *_ in warm}
    chance = random.Random(seed)
    for _ in range(60):
        shares = random_step(chance)
        runner.launch(trial_batch(shares, runner.kv_layout))
        assert not launches.take() - warm, shares


def test_steps_of_the_warm_up_are_steps_that_a_scheduler_can_plan() -> None:
    for tokens, sequences, length in [(300, 6, 1100), (1, 1, 1), (2, 9, 40), (64, 4, 7)]:
        for shares in (
            *kinds_of_steps(tokens, sequences, length),
            largest_step(tokens, sequences, length),
            most_padded_step(tokens, sequences, length),
        ):
            assert sum(rows for _, rows in shares) <= tokens
            assert all(1 <= rows <= context <= length for context, rows in shares)
        largest = largest_step(tokens, sequences, length)
        assert len(largest) == min(tokens, sequences)
        assert sum(rows for _, rows in largest) == min(tokens, sequences * length)


def test_powers_of_two() -> None:
    assert [powers_of_two(most) for most in (1, 2, 3, 8, 9)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 9],
    ]
