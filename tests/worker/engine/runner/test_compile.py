"""Decoder layers through torch.compile: the same tokens, few graphs, and a way back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from promptq.shared.protocol.request import SamplingParams
from promptq.shared.settings.worker import read_worker_settings
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.api.port import Engine
from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.packed_step import PackedStep, Packer
from promptq.worker.engine.attention.step_buffers import StepKind
from promptq.worker.engine.attention.torch_paged import TorchPaged
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.load_check.formula import check_model
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.runner import model_runner
from promptq.worker.engine.runner.compiled import CompiledModel
from promptq.worker.engine.runner.load_runner import runner_of
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.serve.build import build
from tests.worker.engine.tiny_models import generate, make_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within the compiler
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5, 9, 33, 2 * length] * length for length in (1, 8, 3, 15, 6, 2)]
"""One of these joins in each step, so steps have 1 to 60 rows."""


@pytest.fixture(autouse=True)
def forgetting(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Drops compiled code after each test, because models of a family share their code."""
    logging.getLogger("torch.__trace").propagate = False  # thousands of lines
    caplog.set_level(logging.WARNING)
    counters.clear()
    yield
    torch.compiler.reset()


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def serve(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Ten tokens each. A request joins at each step; in a thread, as in a worker."""
    outputs: list[list[int]] = [[] for _ in prompts]

    def work() -> None:
        waiting = list(enumerate(prompts))
        while waiting or engine.has_work:
            if waiting:
                index, prompt = waiting.pop(0)
                engine.add(EngineRequest(index, prompt, GREEDY, seed=0, max_tokens=10))
            for output in engine.step().outputs:
                outputs[output.sequence_id] += output.token_ids

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    return outputs


def loaded_of(model: Any) -> LoadedModel:
    model.requires_grad_(False)
    return LoadedModel("tiny", model, frozenset())


def compiled_runner(model: Any) -> ModelRunner:
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 96, "block_size": 4}
    return runner_of(loaded_of(model), LoadOptions(native=False, compile=True, **options))


def engine_of(runner: ModelRunner) -> LLMEngine:
    return LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=90)


@pytest.mark.long
def test_a_worker_compiles_if_asked() -> None:
    """The shipped model gives the tokens that it gives uncompiled, and the worker says so."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128}
    plain = build(read_worker_settings(native=False, **options))
    expected = serve(plain.engine)
    assert not plain.method.endswith("compiled")
    assert num_graphs() == 0
    compiled = build(read_worker_settings(native=False, compile=True, **options))
    assert compiled.method.endswith(", compiled")
    assert num_graphs() == 2
    assert serve(compiled.engine) == expected
    assert num_graphs() == 2


def step_of(num_rows: int, packer: Packer) -> PackedStep:
    ids = [3 + index % 50 for index in range(num_rows)]
    sequence = Sequence.of(EngineRequest(0, ids, GREEDY, seed=0, max_tokens=1))
    sequence.slot, sequence.block_table = 0, list(range(-(-num_rows // 4)))
    return packer.pack(Batch([ScheduledSequence(sequence, 0, num_rows, samples=True)]))


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("gpt2", 1),
        ("gpt_oss", 1),
        ("ministral3", 1),
        ("llama4_text", 3),
        ("gemma4_text", 4),
    ],
)
@torch.inference_mode()
def test_graphs_are_few(family: str, kinds: int) -> None:
    """Two for each kind of layer, all of them made at load, whatever steps follow."""
    loaded = loaded_of(make_model(family, 7))
    checked = check_model(loaded, [TorchPaged()], 96)
    device = torch.device("cpu")
    cache = KVCache(checked.specs, num_blocks=24, block_size=4, device=device)
    model: Any = checked.on(loaded.model, cache, 96)
    steps = [step_of(num_rows, Packer(4, device)) for num_rows in (96, 1, 2, 31, 32, 8, 64, 48)]
    rows = torch.tensor([0])
    expected = [model.logits(step, rows) for step in steps]
    compiled = CompiledModel(model, cache, 96, backend="eager")
    assert compiled.is_compiled
    assert num_graphs() == 2 * kinds
    for step, logits in zip(steps, expected, strict=True):
        torch.testing.assert_close(compiled.logits(step, rows), logits, atol=1e-3, rtol=1e-3)
    assert num_graphs() == 2 * kinds


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
@torch.inference_mode()
def test_padded_decodes_on_the_triton_backend() -> None:
    from benchmarks.gpu.models import PaddedModel
    from tests.worker.engine.attention.test_triton import DEVICE, TinyModel

    tiny = TinyModel("qwen3", 7)
    for layer in tiny.cache.layers:
        layer.key.zero_()
        layer.value.zero_()
    # 13 is a prime, like TRIAL_ROWS. Attention is an operator in the same graphs as elsewhere, and
    # the test above runs the code that is generated from them.
    compiled = CompiledModel(tiny.model, tiny.cache, 13, backend="aot_eager")
    tiny.prefill()
    kinds = [StepKind(size) for size in (1, 2, 4)]
    graphed = PaddedModel(
        compiled, kinds, max_num_seqs=4, max_model_len=128, block_size=4, device=DEVICE
    )
    outputs = []
    for model in (graphed, tiny.model):
        for num_sequences in (3, 2, 1):
            rows = torch.arange(num_sequences, device=DEVICE)
            outputs.append(model.logits(tiny.decode_step(num_sequences), rows).clone())
        assert compiled.is_compiled == (model is graphed)
        assert num_graphs() == 2
        compiled.undo()
    for padded, plain in zip(outputs[:3], outputs[3:], strict=True):
        torch.testing.assert_close(padded, plain, atol=1e-3, rtol=1e-3)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners trace the graphs and generate no code, which takes long."""
    compiled = partial(CompiledModel, backend="eager")
    monkeypatch.setattr(model_runner, "CompiledModel", compiled)


class Meddling(torch.nn.Module):
    """An activation that a compiler cannot, or must not, take as it is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.kind == "breaks" or (self.kind == "breaks when long" and rows.shape[1] > 70):
            torch._dynamo.graph_break()
        if self.kind == "differs" and torch.compiler.is_compiling():
            rows = rows + 1
        return torch.nn.functional.silu(rows)


def meddled(kind: str) -> Any:
    model: Any = make_model("llama", 7)
    model.model.layers[1].mlp.act_fn = Meddling(kind)
    return model


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("kind", "reason"), [("breaks", "Unsupported: Call to"), ("differs", "off by")]
)
def test_what_cannot_be_compiled_is_served_as_it_is(
    kind: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama", 7)
    expected = [generate(model, prompt, 10) for prompt in PROMPTS]
    runner = compiled_runner(meddled(kind))
    assert runner.compiled is not None
    assert not runner.compiled.is_compiled
    [record] = caplog.records
    assert "the model runs without torch.compile" in record.message
    assert reason in record.message
    assert serve(engine_of(runner)) == expected


@pytest.mark.usefixtures("traced")
def test_what_fails_later_goes_on_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    prompt = [3 + index % 60 for index in range(80)]
    expected = generate(make_model("llama", 7), prompt, 10)
    runner = compiled_runner(meddled("breaks when long"))
    assert runner.compiled is not None
    assert runner.compiled.is_compiled
    assert serve(engine_of(runner), [prompt]) == [expected]
    assert not runner.compiled.is_compiled
    assert len(caplog.records) == 1
