"""All that a step needs goes to the device in one copy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from random import Random
from typing import Any

import numpy.typing as npt
import pytest
import torch

if find_spec("triton") is None or os.environ["TRITON_INTERPRET"] != "1":
    pytest.skip("triton's interpreter is not used here", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

from promptq.worker.engine.attention import packed_step
from promptq.worker.engine.attention.decode_work import FIELDS
from promptq.worker.engine.attention.packed_step import Packer
from promptq.worker.engine.attention.step_buffers import StepBuffers, StepKind
from promptq.worker.engine.attention.types import DECODE_WORK, FULL, PREFILL_WORK, Pattern, SpanList
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence
from promptq.worker.engine.runner.cuda_graphs import GraphedModel
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.engine.sampling.temperature_and_choice import TritonKernels
from promptq.worker.engine.sampling.triton_choice import choose_tokens
from tests.worker.engine.core.stepping import make_sequence
from tests.worker.engine.runner.fake_cuda import FakeCuda
from tests.worker.engine.runner.test_cuda_graphs import PARAMS, random_sequences, run
from tests.worker.engine.runner.test_warm_up import make_runner

CPU = torch.device("cpu")
KINDS = [*map(StepKind, (1, 2, 4)), StepKind(8, is_mixed=True), StepKind(16, is_mixed=True)]


def note_copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note who copies to the device from now on. The kernels compute nothing."""
    noted: list[str] = []

    def noting(module: str, copy: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def to_device(values: Any, device: torch.device) -> torch.Tensor:
            noted.append(module)
            return copy(values, device)

        return to_device

    def at_once(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
        noted.append("a step's inputs")
        return [torch.from_numpy(array) for array in arrays]

    for name, module in list(sys.modules.items()):
        if name.startswith("promptq.worker.engine") and hasattr(module, "to_device"):
            monkeypatch.setattr(module, "to_device", noting(name, module.to_device))
    monkeypatch.setattr(packed_step, "to_device_at_once", at_once)
    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **__: None)
    return noted


def on_triton(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(runner._sampler, "_kernels", TritonKernels(CPU))
    return runner


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])  # the second one with two patterns
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_a_step_makes_one_copy(
    family: str,
    graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Also if sequences join and leave, with any parameters that need no changes of logits."""
    runner = on_triton(make_runner(family), monkeypatch)
    copies = note_copies(monkeypatch)
    cuda = FakeCuda()
    if graphs:
        cuda.install(monkeypatch)
        limits = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 16}
        served = GraphedModel(runner.model, KINDS, **limits, device=CPU, choose=choose_tokens)
        assert served.why_no_graphs == ""
        monkeypatch.setattr(runner, "model", served)
    random = Random(seed)
    chunks = [None, 2, 3, 4, 5, 6, 7, 8]
    for chunk in chunks:  # the first steps find out which lists there are
        run(runner, random_sequences(random, PARAMS, shortest=12), chunk)
    copies.clear()
    for _ in range(20):
        run(runner, random_sequences(random, PARAMS), random.choice(chunks))
        assert copies == ["a step's inputs"] * 2
        copies.clear()
    assert bool(cuda.replayed) == graphs


@pytest.mark.parametrize("kind", [StepKind(4), StepKind(16, is_mixed=True)])
def test_lists_that_come_with_a_step_are_those_that_are_made_for_it(
    kind: StepKind, seed: int
) -> None:
    random = Random(seed)
    asked = [SpanList(FULL, 33), SpanList(Pattern("sliding", 5), 33)]
    given, made = (StepBuffers([kind], 4, 64, 16, CPU) for _ in range(2))
    held = []
    for buffers in (given, made):
        plans = buffers.step(kind).layout.plans
        held.append([plans[DECODE_WORK].spans(each) for each in asked])
        if kind.is_mixed:
            held[-1] += [plans[PREFILL_WORK].tiles(size) for size in (2, 8)]
    packer = Packer(16, CPU)
    for _ in range(5):
        items = []
        for slot in range(random.randint(1, 4)):
            sequence = make_sequence(random.randint(4, 40))
            sequence.slot, sequence.block_table = slot, [slot, 9, 8]
            count = random.randint(2, 4) if kind.is_mixed and slot == 0 else 1
            start = sequence.num_tokens - count
            items.append(ScheduledSequence(sequence, start, count, samples=True))
        batch = Batch(items)
        step = packer.pack(batch, padded_lists=lambda layout, _: given.lists(layout, kind))
        assert len(step.layout.lists) == len(held[0])
        given.fill(step, step.sampled, kind)
        plain = packer.pack(batch)
        assert plain.layout.lists == {}
        made.fill(plain, plain.sampled, kind)
        for one, other in zip(*held, strict=True):
            num_rows = 1 + int(one[0, 0]) if one.shape[1] == FIELDS else len(one)
            assert torch.equal(one[:num_rows], other[:num_rows])
