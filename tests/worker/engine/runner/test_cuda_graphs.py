"""Capturing decode steps, and the device that things go to, without a device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from promptq.shared.protocol.request import SamplingParams
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention.packed_step import PackedStep, Packer
from promptq.worker.engine.attention.step_buffers import StepKind
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner import load_runner as loading
from promptq.worker.engine.runner import model_runner
from promptq.worker.engine.runner.cuda_graphs import GraphedModel, on_device
from promptq.worker.engine.runner.load_runner import load_runner
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.engine.runner.warm_up import warm_up, warm_up_kinds
from promptq.worker.engine.sampling.temperature_and_choice import TritonKernels
from promptq.worker.serve.build import _method
from tests.worker.engine.core.stepping import make_sequence
from tests.worker.engine.runner.fake_cuda import FakeCuda
from tests.worker.engine.tiny_models import save_model

CPU = torch.device("cpu")
KINDS = [*map(StepKind, (1, 2, 4)), StepKind(16, is_mixed=True)]


class TinyModel:
    """A model that returns each row's position, and counts its runs."""

    def __init__(self, forward: Callable[[], None] = lambda: None) -> None:
        self.num_runs = 0
        self._forward = forward

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        self._forward()
        return step.positions[0].index_select(0, rows).unsqueeze(1).float()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def load_tiny(folder: Path) -> ModelRunner:
    options = LoadOptions(device="cpu", dtype="float32", max_num_seqs=2, native=False)
    return load_runner(str(save_model(folder, "llama", 1)), options)


def graphed(model: TinyModel | OnePlace) -> GraphedModel:
    return GraphedModel(model, KINDS, max_num_seqs=4, max_model_len=64, block_size=16, device=CPU)


def decodes(count: int) -> PackedStep:
    items = []
    for slot in range(count):
        sequence = make_sequence(5 + slot)
        sequence.slot, sequence.block_table = slot, [slot]
        items.append(ScheduledSequence(sequence, 4 + slot, 1, samples=True))
    return Packer(16, CPU).pack(Batch(items))


def chunks(count: int) -> PackedStep:
    sequence = make_sequence(count)
    sequence.slot, sequence.block_table = 0, [0]
    return Packer(16, CPU).pack(Batch([ScheduledSequence(sequence, 0, count, samples=True)]))


def test_all_sizes_are_captured_on_one_stream_into_one_pool(cuda: FakeCuda) -> None:
    before = cuda.stream
    model = graphed(TinyModel())
    assert model.why_no_graphs == ""
    graphs = [graph for graph, _, _ in cuda.captured]
    assert len(graphs) == len(KINDS)
    assert len({stream for _, stream, _ in cuda.captured} | {before}) == 2
    assert len({pool for _, _, pool in cuda.captured}) == 1
    assert (cuda.open_pools, cuda.stream, cuda.sync_debug_mode) == ([], before, 0)
    model.logits(decodes(3), torch.arange(3))
    model.logits(decodes(1), torch.arange(1))
    model.logits(chunks(9), torch.tensor([8]))
    assert cuda.replayed == [graphs[1], graphs[3], graphs[0]]  # the largest was captured first


def test_a_step_that_waits_for_the_device_is_never_captured(cuda: FakeCuda) -> None:
    tiny = TinyModel(cuda.wait)
    model = graphed(tiny)
    assert cuda.captured == []
    assert cuda.sync_debug_mode == 0
    assert model.why_no_graphs == "called a synchronizing CUDA operation"
    num_runs = tiny.num_runs
    logits = model.logits(decodes(3), torch.arange(3))
    assert logits.flatten().tolist() == [6.0, 5.0, 4.0]
    assert tiny.num_runs == num_runs + 1


def test_a_capture_that_breaks_leaves_no_pool_open_and_no_stream_behind(cuda: FakeCuda) -> None:
    before, cuda.breaks_captures = cuda.stream, True
    model = graphed(TinyModel())
    assert len(cuda.captured) == 1
    assert (cuda.open_pools, cuda.stream) == ([], before)
    assert "error during capture" in model.why_no_graphs
    assert model.logits(decodes(2), torch.arange(2)).flatten().tolist() == [5.0, 4.0]


class OnePlace:
    """A model whose results differ from step to step, and lie where the last ones lay."""

    def __init__(self, vocab_size: int) -> None:
        self._logits = torch.zeros(16, vocab_size)

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        return self._logits.add_(torch.arange(self._logits.shape[1]))[: len(rows)]

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.logits(step, rows), torch.zeros(len(kept), 1)


def test_a_warm_up_compares_results_that_graphs_write_to_one_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner = load_tiny(tmp_path)
    monkeypatch.setattr(runner, "model", OnePlace(runner.vocab_size))
    warm_up(runner)
    assert not runner.is_row_invariant


def test_the_warm_up_of_kernels_replays_no_graph(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their kernels were compiled when they were captured, for their own sizes alone."""
    runner = load_tiny(tmp_path)
    served = graphed(OnePlace(runner.vocab_size))
    assert served.why_no_graphs == ""
    monkeypatch.setattr(runner, "model", served)
    warm_up_kinds(runner, 16, 2)
    assert cuda.replayed == []
    assert runner.model is served


def test_the_ready_line_says_why_there_are_no_graphs(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner, settings = load_tiny(tmp_path), WorkerSettings()
    assert _method(runner, settings) == "no native code (it is turned off)"
    monkeypatch.setattr(runner, "device", torch.device("cuda", 0))
    assert _method(runner, settings) == "no fused kernels (it is turned off)"
    monkeypatch.setattr(runner, "why_no_own_code", "")
    assert _method(runner, settings) == "fused kernels"
    cuda.breaks_captures = True
    monkeypatch.setattr(runner, "model", graphed(TinyModel()))
    assert _method(runner, settings).endswith(f"no CUDA graphs ({runner.why_no_graphs})")


def test_a_cuda_device_is_current_while_it_is_used(cuda: FakeCuda) -> None:
    with on_device(torch.device("cuda", 1)):
        assert cuda.devices[-1] == torch.device("cuda", 1)
    with on_device(CPU):
        assert cuda.devices == [torch.device("cuda", 0)]


def test_all_that_a_runner_computes_goes_to_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: FakeCuda
) -> None:
    """The model on the CPU stands for one on `cuda:1`."""
    second = torch.device("cuda", 1)
    for module in (loading, model_runner):
        monkeypatch.setattr(module, "on_device", lambda device: on_device(second))
    seen: list[torch.device] = []

    def note(name: str, owner: Any) -> None:
        plain = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            seen.append(cuda.devices[-1])
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    for name in ("load_model", "check_model", "KVCache"):
        note(name, loading)
    runner = load_tiny(tmp_path)
    note("logits", runner.model)
    note("sample", runner._sampler)
    sequence = make_sequence(5, tokens=[3, 4, 5, 6, 7])
    sequence.slot, sequence.block_table = 0, [0]
    launched = runner.launch(Batch([ScheduledSequence(sequence, 0, 5, samples=True)]))
    assert launched.sampled is not None
    note("lists", type(launched.sampled.copies))
    assert len(runner.collect(launched)) == 1
    assert seen == [second] * 6
    assert cuda.devices == [torch.device("cuda", 0)]


class Toy:
    """Logits that depend on a row's token and position, for any device memory."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._of_tokens = torch.randn(vocab_size, vocab_size, generator=generator) * 2
        self._of_positions = torch.randn(64, vocab_size, generator=generator)

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        tokens = step.input_ids[0].index_select(0, rows)
        positions = step.positions[0].index_select(0, rows)
        found = self._of_tokens.index_select(0, tokens) + self._of_positions[positions]
        return found.bfloat16()

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.logits(step, rows), step.positions[0].index_select(0, kept).unsqueeze(1)


def test_a_step_that_needs_hidden_states_replays_no_graph(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    """A graph gives logits alone. Steps beside it are replayed as ever."""
    runner = load_tiny(tmp_path)
    toy = Toy(runner.vocab_size, seed)
    limits = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 16}
    monkeypatch.setattr(runner, "model", GraphedModel(toy, KINDS, **limits, device=CPU))
    engine = LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=16)
    engine.add(EngineRequest(1, [5, 6, 7], SamplingParams(), 0, max_tokens=1, pooling="mean"))
    [output] = engine.step().outputs
    assert output.embedding is not None
    assert output.embedding.tolist() == [1.0]
    assert cuda.replayed == []
    engine.add(EngineRequest(2, [5, 6, 7], SamplingParams(), 0, max_tokens=1))
    engine.step()
    assert len(cuda.replayed) == 1


_ids = count(1000)
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"min_p": 0.01, "top_k": 20, "top_p": 0.9, "temperature": 1.4},
]
ADJUSTED: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"presence_penalty": 0.7, "top_p": 0.8},
    {"logit_bias": {"3": 4.0}},
    {"min_tokens": 9},
]


@pytest.mark.parametrize("further", [[], ADJUSTED], ids=["choices of the graphs", "all"])
def test_graphs_choose_what_is_chosen_without_them(
    further: list[dict[str, Any]],
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    seed: int,
) -> None:
    """In steps of random sequences, with parameters of all kinds beside each other. Each second
    step begins with the tokens that lie where the first one's graph left them."""
    choice_kernel = pytest.importorskip("promptq.worker.engine.sampling.triton_choice")
    plain = load_tiny(tmp_path)
    served = load_tiny(tmp_path)
    toy = Toy(plain.vocab_size, seed)
    limits = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 16}
    graphs = GraphedModel(toy, KINDS, **limits, device=CPU, choose=choice_kernel.choose_tokens)
    num_chosen = 0

    def choose(*args: Any) -> Any:
        nonlocal num_chosen
        num_chosen += 1
        return choice_kernel.choose_tokens(*args)

    for runner, model in ((plain, toy), (served, graphs)):
        kernels = TritonKernels(CPU)
        monkeypatch.setattr(runner, "model", model)
        monkeypatch.setattr(runner._sampler, "_kernels", kernels)
        if runner is served and not further:
            monkeypatch.setattr(kernels, "choose", choose)
    random = Random(seed)
    for _ in range(4):
        sequences = random_sequences(random, [*PARAMS, *further])
        chunk = random.choice([None, 5])
        tokens = [run(runner, sequences, chunk) for runner in (plain, served)]
        assert tokens[0] == tokens[1]
    assert len(cuda.replayed) == 8
    assert num_chosen == 0


def random_sequences(
    random: Random, params: list[dict[str, Any]], shortest: int = 2
) -> list[Sequence]:
    made = []
    for slot in range(random.randint(1, 4)):
        request = EngineRequest(
            next(_ids),
            [random.randrange(30) for _ in range(random.randint(shortest, 12))],
            SamplingParams(**random.choice(params)),
            seed=random.randrange(1 << 30),
            max_tokens=20,
            end_token_ids=frozenset({1}),
        )
        sequence = Sequence.of(request)
        sequence.slot, sequence.block_table = slot, [slot]
        made.append(sequence)
    return made


def run(runner: ModelRunner, sequences: list[Sequence], chunk: int | None) -> Any:
    """A step of decodes, the first one with a chunk if there is one, and the step after it."""
    first, second = [], []
    for place, sequence in enumerate(sequences):
        end = sequence.num_tokens
        count = min(end, chunk or 1) if place == 0 else 1
        first.append(ScheduledSequence(sequence, end - count, count, samples=True))
        second.append(ScheduledSequence(sequence, end, 1, samples=True))
    launched = runner.launch(Batch(first))
    tokens = runner.collect(launched)  # on a CPU, the next step writes to the same place at once
    return tokens, runner.collect(runner.launch(Batch(second), launched))
