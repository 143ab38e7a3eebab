"""The worker measures memory before it allocates the KV cache, and no cache outlives its use."""

from __future__ import annotations

import gc
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention import kv_cache_size
from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.kv_cache_size import CUDA_SHARE, MIN_BLOCKS
from promptq.worker.engine.attention.step_buffers import StepKind
from promptq.worker.engine.attention.torch_paged import TorchPaged
from promptq.worker.engine.attention.types import LayerCache
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.engine.device import memory
from promptq.worker.engine.device.memory import MemoryPeak
from promptq.worker.engine.load_check import comparison
from promptq.worker.engine.load_check.comparison import TF32_TOLERANCE, TOLERANCE
from promptq.worker.engine.load_check.formula import check_model
from promptq.worker.engine.model import loading
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions, load_model
from promptq.worker.engine.runner import load_runner
from promptq.worker.engine.runner.cuda_graphs import GraphedModel, graph_bytes
from promptq.worker.engine.runner.load_runner import runner_of
from promptq.worker.engine.runner.model_runner import ModelRunner
from tests.worker.engine.device.test_precision import forced_tf32
from tests.worker.engine.runner.fake_cuda import FakeCuda
from tests.worker.engine.runner.test_cuda_graphs import TinyModel
from tests.worker.engine.tiny_models import make_model, save_model

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
MIB = 1 << 20
OPTIONS = LoadOptions(
    max_num_seqs=3, max_num_batched_tokens=20, max_model_len=32, block_size=4, native=False
)
BLOCK_BYTES = 4 * 2 * 2 * (8 + 8) * 4
"""Of the tiny llama: 4 tokens, 2 layers, 2 KV heads, keys and values of size 8, in fp32."""


@pytest.fixture(autouse=True)
def unaware_of_others() -> None:
    """Collections of garbage do not look through what earlier tests left: it may be millions of
    objects."""
    gc.freeze()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The CPU stands for a CUDA device whose memory is counted."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    for module in (memory, kv_cache_size, load_runner):
        monkeypatch.setattr(module, "counts_memory", lambda device: True)
    return fake


def loaded() -> LoadedModel:
    return LoadedModel("tiny", make_model("llama", 1), frozenset())


def note_work(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, reserved: int = 0, peak: int = 0
) -> None:
    """Note caches and steps among the questions. Any step leaves these figures behind."""
    launch, allocate = ModelRunner.launch, KVCache.__init__

    def launching(self: ModelRunner, batch: Batch, after: Any = None) -> Any:
        rows = sum(item.num_rows for item in batch.scheduled)
        samples = sum(item.num_samples for item in batch.scheduled)
        cuda.asked.append(f"step of {rows} rows and {samples} samples")
        cuda.reserved, cuda.peak = reserved, peak
        return launch(self, batch, after)

    def allocating(self: KVCache, *args: Any, num_blocks: int, **kwargs: Any) -> None:
        cuda.asked.append(f"cache of {num_blocks} blocks")
        allocate(self, *args, num_blocks=num_blocks, **kwargs)

    monkeypatch.setattr(ModelRunner, "launch", launching)
    monkeypatch.setattr(KVCache, "__init__", allocating)


def test_a_cache_takes_memory_only_where_it_is_written() -> None:
    """Or each start would write gigabytes of zeros."""
    spec = check_model(loaded(), [TorchPaged()], 32).specs[0]
    before = resident_bytes()
    cache = KVCache([spec], num_blocks=2**24, block_size=4, device=CPU)
    assert cache.num_blocks * 4 * cache.bytes_per_token > 2**32
    cache.layers[0].key[2**23] = 1.0
    assert cache.layers[0].key[2**23 : 2**23 + 2].sum() == cache.layers[0].key[0].numel()
    assert resident_bytes() - before < 2**26


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_the_largest_step_is_measured_before_the_cache_is_allocated(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_work(cuda, monkeypatch, reserved=8 * MIB, peak=6 * MIB)
    held = 10
    cuda.free = iter([1 << 30, int(8 * MIB + held * BLOCK_BYTES / CUDA_SHARE) + 1])
    runner = runner_of(loaded(), OPTIONS)
    assert runner.kv_layout.num_blocks == held
    step = cuda.asked.index("step of 20 rows and 3 samples")
    trial = max(place for place in range(step) if cuda.asked[place].startswith("cache of"))
    assert cuda.asked[trial] == f"cache of {MIN_BLOCKS} blocks"
    before, after = cuda.asked[:trial], cuda.asked[step + 1 :]
    assert before[-4:] == [
        "empty_cache",
        "reset_peak_memory_stats",
        "memory_reserved",
        "memory_allocated",
    ]
    assert after[:6] == [
        "memory_reserved",
        "max_memory_allocated",
        "empty_cache",
        "reset_peak_memory_stats",
        "mem_get_info",
        f"cache of {held} blocks",
    ]
    # The largest step also runs with the cache in place, before the runner is ready.
    assert cuda.asked[-1] == "step of 20 rows and 3 samples"


def test_the_cache_of_the_measured_step_is_freed_before_the_cache_is_allocated(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = KVCache.__init__
    trials: list[weakref.ref[torch.Tensor]] = []
    living: list[int] = []

    def allocating(self: KVCache, *args: Any, num_blocks: int, **kwargs: Any) -> None:
        gc.collect()
        living.append(sum(trial() is not None for trial in trials))
        allocate(self, *args, num_blocks=num_blocks, **kwargs)
        trials.append(weakref.ref(self.layers[0].key))

    monkeypatch.setattr(KVCache, "__init__", allocating)
    cuda.free = iter([1 << 30, 8 * MIB])
    runner_of(loaded(), OPTIONS)
    assert len(living) > 1
    assert living[-1] == 0


def test_a_cache_of_a_given_size_is_not_measured_for(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_work(cuda, monkeypatch)
    options = LoadOptions(kv_cache_memory=9 * BLOCK_BYTES, block_size=4, native=False)
    assert runner_of(loaded(), options).kv_layout.num_blocks == 9
    assert "mem_get_info" not in cuda.asked


def test_no_room_beside_the_largest_step(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    note_work(cuda, monkeypatch, reserved=8 * MIB)
    cuda.free = iter([1 << 30, 8 * MIB + BLOCK_BYTES])
    with pytest.raises(ConfigurationError, match=r"--max-num-batched-tokens: .* takes 8388608 byt"):
        runner_of(loaded(), OPTIONS)


@pytest.mark.parametrize(
    ("measured", "option"),
    [(True, "--max-num-batched-tokens"), (False, "--kv-cache-memory")],
)
def test_the_error_for_a_step_that_does_not_fit_names_the_option(
    measured: bool, option: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(self: ModelRunner, batch: Batch, after: Any = None) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "launch", launch)
    memory_bytes = None if measured else 9 * BLOCK_BYTES
    options = LoadOptions(
        kv_cache_memory=memory_bytes, block_size=4, max_model_len=32, native=False
    )
    with pytest.raises(ConfigurationError, match=f"{option}: the largest step does not fit"):
        runner_of(loaded(), options)


@pytest.mark.parametrize(
    ("reserved", "peak", "taken"), [(900, 700, 400), (500, 950, 550), (500, 400, 0)]
)
def test_the_larger_one_of_reserved_and_allocated_memory_counts(
    reserved: int, peak: int, taken: int, cuda: FakeCuda
) -> None:
    cuda.reserved, cuda.allocated = 500, 400
    measured = MemoryPeak(CUDA)
    cuda.reserved, cuda.peak = reserved, peak
    assert measured.bytes() == taken


@pytest.mark.parametrize(("sizes", "needed"), [([1, 2, 4, 8], 100 + 3 * 7), ([1], 100)])
def test_graphs_are_estimated_by_the_two_largest(
    sizes: list[int], needed: int, cuda: FakeCuda
) -> None:
    cuda.free = iter([1000, 900, 1000, 893])
    kinds = [StepKind(size) for size in sizes]
    limits = {"max_num_seqs": 8, "max_model_len": 64, "block_size": 16}
    capture = partial(GraphedModel, TinyModel(), **limits, device=CPU)
    assert graph_bytes(kinds, capture, CPU) == needed
    assert len(cuda.captured) == (2 if len(sizes) == 1 else 4)


def test_all_trials_of_graphs_are_captured_on_one_stream(cuda: FakeCuda) -> None:
    """Libraries keep memory for each stream on which they worked."""
    pytest.importorskip("triton")
    runner = runner_of(loaded(), OPTIONS)
    graph_bytes([StepKind(2), StepKind(1)], runner.capturing(OPTIONS), CPU)
    assert len(cuda.captured) == 4
    assert len({stream for _, stream, _ in cuda.captured}) == 1
    assert len({pool for _, _, pool in cuda.captured}) == 3


def caches_alive() -> dict[int, LayerCache]:
    """Made by the test, by id. They stay alive with the result, so that no id is used twice."""
    gc.collect()
    return {id(each): each for each in gc.get_objects() if type(each) is LayerCache}


@pytest.mark.parametrize(("native", "measured"), [(True, False), (False, False), (False, True)])
def test_one_cache_is_alive_after_the_load(
    native: bool, measured: bool, request: pytest.FixtureRequest
) -> None:
    """Not that of the check at load, nor that of the largest step, while the model lives on."""
    model = loaded()
    if measured:
        request.getfixturevalue("cuda")
    options = LoadOptions(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16, native=native)
    runner = runner_of(model, options)
    assert caches_alive().keys() == {*map(id, runner.cache.layers)}


def test_peak_memory_is_read_for_snapshots_only(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(loaded(), OPTIONS)
    monkeypatch.setattr(
        ModelRunner,
        "peak_memory_bytes",
        lambda self: torch.cuda.max_memory_allocated(CUDA),
    )
    engine = LLMEngine(runner, max_num_seqs=2, max_num_batched_tokens=8)
    engine.add(EngineRequest(0, [3, 4, 5], SamplingParams(), seed=0, max_tokens=3))
    cuda.asked.clear()
    cuda.peak = 77
    while engine.has_work:
        engine.step()
    assert cuda.asked == []
    assert engine.snapshot().peak_memory_bytes == 77


def test_forced_tf32_is_reported_and_tolerated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used: list[float] = []
    difference = comparison.Difference

    def noting(median: float, worst: float, tolerance: float, *more: Any) -> Any:
        used.append(tolerance)
        return difference(median, worst, tolerance, *more)

    monkeypatch.setattr(comparison, "Difference", noting)
    check_model(loaded(), [TorchPaged()], 32)
    assert (used.pop(), caplog.text) == (TOLERANCE, "")
    monkeypatch.setattr(torch, "mm", forced_tf32)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    check_model(loaded(), [TorchPaged()], 32)
    assert used.pop() == TF32_TOLERANCE
    assert "NVIDIA_TF32_OVERRIDE=1" in caplog.text


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("installed", [True, False])
def test_weights_go_straight_to_a_cuda_device(
    device: torch.device, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the package that the library needs for it is there. A CPU maps the files instead."""
    source = str(save_model(tmp_path, "llama"))
    plain = AutoModelForCausalLM.from_pretrained
    asked: list[Any] = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.pop("device_map", None))
        return plain(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noting)
    monkeypatch.setattr(loading, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(loading, "free_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)
    load_model(source, device=device)
    assert asked == [{"": device} if installed and device == CUDA else None]
