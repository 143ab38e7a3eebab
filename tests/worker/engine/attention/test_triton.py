"""The Triton kernels in Triton's interpreter, or with TRITON_INTERPRET=0 on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

from benchmarks.gpu.cases import Case, Shape, off_by
from benchmarks.gpu.models import PaddedModel
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention.decode_work import cut
from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.packed_step import PackedStep, Packer
from promptq.worker.engine.attention.prefill_work import PrefillWork
from promptq.worker.engine.attention.step_buffers import StepBuffers, StepKind
from promptq.worker.engine.attention.triton_kernels.decode import NUM_WARPS, PROGRAMS_PER_PROCESSOR
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.attention.types import DECODE_WORK, FULL, Pattern, Scoring, SpanList
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.decoders.kernels.quantized_product import programs_per_processor
from promptq.worker.engine.decoders.kernels.widening import STEP
from promptq.worker.engine.load_check.formula import check_model
from promptq.worker.engine.model.loading import LoadedModel
from promptq.worker.engine.model.packed_model import PackedModel
from promptq.worker.engine.runner.cuda_graphs import graph_kinds
from tests.support.paths import ROOT
from tests.worker.engine.attention.compile_kernels import SHARED_MEMORY
from tests.worker.engine.tiny_models import FAMILIES, VOCAB_SIZE, check_on_torch, make_model

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = [
    Shape(4, 4, 8, 8, block_size=4),
    Shape(6, 2, 16, 16, block_size=4),
    Shape(4, 1, 16, 12, block_size=16),
    Shape(3, 3, 24, 40, block_size=5),
]
LATENT_SHAPES = [Shape(4, 1, 8, 16, 4, is_latent=True), Shape(20, 1, 12, 40, 5, is_latent=True)]
STEPS = {
    "decodes": [(70, 1), (24, 1), (17, 1), (8, 1), (1, 1)],
    "long decodes": [(600, 1), (130, 1), (5, 1)],
    "whole prompts": [(9, 9), (2, 2), (75, 75)],
    "later chunks": [(21, 5), (16, 8), (90, 6), (12, 3)],
    "all at once": [(130, 1), (9, 1), (20, 20), (19, 6), (18, 17), (72, 40)],
}


def assert_is_attention(
    step: str, shape: Shape, pattern: Pattern, dtype: torch.dtype, seed: int
) -> None:
    """With and without softcap and sinks, in a cache and into memory that are poisoned."""
    for softcap, with_sinks in ((None, False), (1.5, True)):
        case = Case(STEPS[step], shape, dtype=dtype, device=DEVICE, seed=seed)
        scoring = Scoring(0.3, pattern, softcap, case.sinks if with_sinks else None)
        output = case.attend(TritonPaged(), scoring)
        assert output.dtype == dtype
        assert off_by(output, case.expected(scoring)) < TOLERANCE[dtype], (shape, scoring)
        assert case.untouched()


@pytest.mark.matrix(4)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("pattern", [FULL, Pattern("sliding", 6), Pattern("chunked", 8)], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_equals_plain_attention(step: str, pattern: Pattern, shape: Shape, seed: int) -> None:
    assert_is_attention(step, shape, pattern, torch.float32, seed)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", STEPS)
def test_low_precision(step: str, dtype: torch.dtype, seed: int) -> None:
    assert_is_attention(step, SHAPES[1], Pattern("sliding", 40), dtype, seed)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("step", STEPS)
def test_keys_and_values_in_fp8(step: str, seed: int) -> None:
    for shape in (*SHAPES[1:], LATENT_SHAPES[0]):
        case = Case(
            *(STEPS[step], shape),
            dtype=torch.bfloat16,
            kept=torch.float8_e4m3fn,
            device=DEVICE,
            seed=seed,
        )
        output = case.attend(TritonPaged(), Scoring(0.3, Pattern("sliding", 40)))
        expected = case.expected(Scoring(0.3, Pattern("sliding", 40)))
        assert off_by(output, expected) < TOLERANCE[torch.bfloat16], shape
        assert case.untouched()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", STEPS)
def test_latents(step: str, dtype: torch.dtype, seed: int) -> None:
    """All heads read one latent, in several programs if the heads are many."""
    for shape in LATENT_SHAPES:
        assert_is_attention(step, shape, FULL, dtype, seed)


def test_heads_without_groups(seed: int) -> None:
    assert_is_attention("all at once", SHAPES[0], Pattern("sliding", 1), torch.float32, seed)


def test_padding_rows(seed: int) -> None:
    """Rows of no block and no context write nothing, disturb nobody, and come out as zero."""
    case = Case(STEPS["long decodes"], SHAPES[1], dtype=torch.float32, device=DEVICE, seed=seed)
    padded = Case(
        [*STEPS["long decodes"], (1, 1), (1, 1)],
        SHAPES[1],
        dtype=torch.float32,
        device=DEVICE,
        seed=seed,
    )
    layout = padded.layout
    layout.context_lens[3:] = [0, 0]
    layout.write_blocks[3:] = -1
    before = padded.cache.key.clone(), padded.cache.value.clone()
    for scoring in (Scoring(0.3), Scoring(0.3, Pattern("chunked", 8)), Scoring(0.3, FULL, 2.0)):
        output = padded.attend(TritonPaged(), scoring)
        expected = case.attend(TritonPaged(), scoring)
        assert expected.isfinite().all()
        assert not output[3:].any()
    written = layout.write_blocks[:3], layout.write_offsets[:3]
    for tensor, old in zip((padded.cache.key, padded.cache.value), before, strict=True):
        changed = (tensor.nan_to_num(9.0) != old.nan_to_num(9.0)).any(dim=(1, 3)).nonzero()
        assert {tuple(place) for place in changed.tolist()} <= {
            (int(block), int(offset)) for block, offset in zip(*written, strict=True)
        }


def test_strides_do_not_matter(seed: int) -> None:
    """Queries, keys and values come as views into larger tensors."""
    case = Case(STEPS["all at once"], SHAPES[1], dtype=torch.float32, device=DEVICE, seed=seed)
    expected = case.attend(TritonPaged(), Scoring(0.3))

    class Awkward(TritonPaged):
        def attend(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
        ) -> torch.Tensor:
            key = key.transpose(0, 1).contiguous().transpose(0, 1)
            value = value.transpose(1, 2).contiguous().transpose(1, 2)
            wide = torch.cat([query, torch.full_like(query, float("nan"))], dim=-1)
            return super().attend(wide[..., : query.shape[-1]], key, value, *others)

    torch.testing.assert_close(case.attend(Awkward(), Scoring(0.3)), expected)


def test_tiles_hold_every_row_once(seed: int) -> None:
    case = Case(STEPS["all at once"], SHAPES[1], dtype=torch.float32, device=DEVICE, seed=seed)
    tiles = PrefillWork(case.layout).tiles(7).tolist()
    rows = [first + row for _, first, count, _ in tiles for row in range(count)]
    assert sorted(rows) == list(range(2, len(case.query)))
    assert [tile[3] for tile in tiles] == sorted((tile[3] for tile in tiles), reverse=True)


class TinyModel:
    """A tiny model of a family on the Triton backend, and two more sequences than a step uses."""

    def __init__(self, family: str, seed: int) -> None:
        model = make_model(family, seed)
        model.requires_grad_(False).to(DEVICE)
        loaded = LoadedModel(family, model, frozenset())
        checked = check_on_torch(loaded, TritonPaged(), 128)
        self.cache = KVCache(checked.specs, num_blocks=64, block_size=4, device=DEVICE)
        for layer in self.cache.layers:
            layer.key.fill_(float("nan"))
            layer.value.fill_(float("nan"))
        self.model: PackedModel = checked.on(model, self.cache, 128)
        self.packer = Packer(4, DEVICE)
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.randperm(64, generator=generator).tolist()
        self.sequences = []
        for index, length in enumerate((3, 17, 9)):
            ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
            request = EngineRequest(index, ids, SamplingParams(), seed=0, max_tokens=9)
            sequence = Sequence.of(request)
            sequence.slot, sequence.block_table = index, [blocks.pop() for _ in range(6)]
            self.sequences.append(sequence)

    def pack(self, cuts: list[tuple[int, int]]) -> PackedStep:
        """Each sequence's tokens from one position up to another."""
        shares = zip(self.sequences, cuts, strict=False)
        return self.packer.pack(
            Batch([ScheduledSequence(each, a, b - a, samples=True) for each, (a, b) in shares])
        )

    def prefill(self) -> None:
        step = self.pack([(0, each.num_tokens - 1) for each in self.sequences])
        self.model.logits(step, torch.tensor([0], device=DEVICE))

    def decode_step(self, num_sequences: int) -> PackedStep:
        lengths = [each.num_tokens for each in self.sequences[:num_sequences]]
        return self.pack([(length - 1, length) for length in lengths])


class Recording:
    """A model that notes how many rows its steps had."""

    def __init__(self, model: PackedModel) -> None:
        self.model = model
        self.num_rows: list[int] = []

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        self.num_rows.append(step.input_ids.shape[1])
        return self.model.logits(step, rows)


KINDS = [*map(StepKind, (1, 2, 4)), StepKind(16, is_mixed=True), StepKind(32, is_mixed=True)]


def padded(model: Any, kinds: list[StepKind] = KINDS) -> PaddedModel:
    return PaddedModel(model, kinds, max_num_seqs=4, max_model_len=128, block_size=4, device=DEVICE)


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Four rows are multiplied another way than three, and experts pass the rounding on."""
    assert expected.isfinite().all()
    off = (logits - expected).norm(dim=1)
    spread = (expected - expected.mean(dim=1, keepdim=True)).norm(dim=1)
    assert (off < 1e-3 * spread).all()


@torch.inference_mode()
def test_padded_steps_give_the_same_logits(seed: int) -> None:
    """Also after a step of another size or kind, whose rows the buffers still hold."""
    tiny = TinyModel(["qwen3", "gemma2", "gpt_oss"][seed % 3], seed)
    recording = Recording(tiny.model)
    graphed = padded(recording)
    tiny.prefill()
    recording.num_rows.clear()
    steps = [
        tiny.decode_step(3),
        tiny.pack([(2, 3), (8, 17), (8, 9)]),  # a chunk beside two decodes
        tiny.decode_step(2),
        tiny.pack([(0, 3), (0, 17), (0, 9)]),  # chunks alone
        tiny.pack([(2, 3), (5, 10)]),
        tiny.decode_step(1),
    ]
    for step in steps:
        rows = torch.arange(len(step.items), device=DEVICE).flip(0)
        expected = tiny.model.logits(step, rows)
        assert_close(graphed.logits(step, rows), expected)
    if DEVICE.type == "cpu":  # where replays run the model
        assert recording.num_rows == [4, 16, 2, 32, 16, 1]


@torch.inference_mode()
def test_a_padded_chunk_writes_its_own_keys_and_values_only(seed: int) -> None:
    tiny, plain = TinyModel("qwen3", seed), TinyModel("qwen3", seed)
    cuts = [(0, 3), (0, 17)]
    row = torch.tensor([0], device=DEVICE)
    padded(tiny.model).logits(tiny.pack(cuts), row)
    plain.model.logits(plain.pack(cuts), row)
    for layer, expected in zip(tiny.cache.layers, plain.cache.layers, strict=True):
        torch.testing.assert_close(layer.key, expected.key, equal_nan=True)
        torch.testing.assert_close(layer.value, expected.value, equal_nan=True)


@torch.inference_mode()
def test_other_steps_run_as_they_are(seed: int) -> None:
    tiny = TinyModel("qwen3", seed)
    recording = Recording(tiny.model)
    graphed = padded(recording, [StepKind(2), StepKind(16, is_mixed=True)])
    tiny.prefill()
    recording.num_rows.clear()
    for step in (tiny.decode_step(3), tiny.pack([(0, 2), (0, 16), (0, 8)])):
        rows = torch.tensor([1], device=DEVICE)
        torch.testing.assert_close(graphed.logits(step, rows), tiny.model.logits(step, rows))
    step, rows = tiny.pack([(1, 3), (7, 12)]), torch.arange(5, device=DEVICE)  # of four at most
    torch.testing.assert_close(graphed.logits(step, rows), tiny.model.logits(step, rows))
    assert recording.num_rows == [3, 26, 7]


@torch.inference_mode()
def test_rows_of_an_earlier_step_become_padding(seed: int) -> None:
    """They would write into blocks that may be another's by now."""
    tiny, kind = TinyModel("qwen3", seed), StepKind(4)
    buffers = StepBuffers([kind], 4, 128, 4, DEVICE)
    held, exact = buffers.step(kind), tiny.decode_step(2)
    buffers.fill(tiny.decode_step(3), torch.tensor([2, 1, 0], device=DEVICE), kind)
    buffers.fill(exact, torch.tensor([1], device=DEVICE), kind)
    assert held.layout.write_blocks.tolist() == [*exact.layout.write_blocks.tolist(), -1, -1]
    asked = SpanList(FULL, 33)
    spans = held.layout.plans[DECODE_WORK].spans(asked).tolist()
    assert spans == cut([*exact.layout.context_lens, 0, 0], asked).tolist()
    assert held.input_ids.tolist() == [[*exact.input_ids[0].tolist(), 0, 0]]
    assert held.positions.tolist() == [[*exact.positions[0].tolist(), 0, 0]]
    assert held.sampled.tolist() == [1, 0, 0, 0]
    width = exact.layout.block_tables.shape[1]
    torch.testing.assert_close(held.layout.block_tables[:2, :width], exact.layout.block_tables)


def test_kinds_of_graphs() -> None:
    def decodes(max_num_seqs: int) -> list[int]:
        kinds = graph_kinds(max_num_seqs, max_num_batched_tokens=2048)
        return [kind.num_rows for kind in kinds if not kind.is_mixed]

    assert decodes(1) == [1]
    assert decodes(4) == [1, 2, 4]
    assert decodes(20) == [1, 2, 4, 8, 16, 20]
    assert decodes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert decodes(1000)[-1] == 256
    mixed = [kind.num_rows for kind in graph_kinds(64, 150) if kind.is_mixed]
    assert mixed == [16, 32, 64, 128]
    assert max(graph_kinds(64, 2048)) == StepKind(512, is_mixed=True)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_pass_the_check_at_load(family: str) -> None:
    """Packed steps on these kernels give what the library's own attention gives."""
    model = make_model(family)
    model.requires_grad_(False).to(DEVICE)
    backend = TritonPaged()
    assert check_model(LoadedModel(family, model, frozenset()), [backend], 128).backend is backend


def registers_of(launch: dict[str, Any], threads: int) -> int:
    """Of so many threads: registers are given out by eights."""
    return threads * -(-launch["registers"] // 8) * 8


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the kernels run, so they compile")
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_kernels_compile(architecture: int, seed: int, pytestconfig: pytest.Config) -> None:
    """For real cards: what the interpreter takes, the compiler may refuse. Prefill reads tiles of K
    and V ahead, nothing spills, and as many programs fit on a processor as are planned for."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    command = [sys.executable, str(script), str(architecture), str(seed)]
    command += ["--whole"] if pytestconfig.option.whole else []
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert {launch["kernel"] for launch in launches} == {
        "_write_kernel",
        "_decode_kernel",
        "_prefill_kernel",
        "_draw_kernel",
        "_add_norm_kernel",
        "_place_heads_kernel",
        "_place_latent_kernel",
        "_activation_kernel",
        "_choice_kernel",
        "_sort_kernel",
        "_grouped_kernel",
        "_sum_kernel",
        "_convolution_kernel",
        "decode_scan_kernel",
        "chunked_scan_kernel",
        "_gated_norm_kernel",
        "_product_kernel",
        "_widen_kernel",
        *(["_round_kernel"] if architecture >= 90 else []),
    }
    for launch in launches:
        assert launch["stack"] == 0, launch
        assert launch["shared"] <= SHARED_MEMORY[architecture], launch
        if launch["kernel"] == "_prefill_kernel":
            assert min(launch["buffers"]) >= 2, launch
            assert max(launch["waits"]) >= 2, launch  # one tile's K and V
        if launch["kernel"] == "_decode_kernel":
            at_once = PROGRAMS_PER_PROCESSOR * NUM_WARPS // launch["warps"]
            assert at_once * launch["shared"] <= SHARED_MEMORY[architecture], launch
            assert min(launch["buffers"]) >= 1, launch
            threads = PROGRAMS_PER_PROCESSOR * NUM_WARPS * 32
            assert registers_of(launch, threads) <= 65_536, launch
        if launch["kernel"] == "_product_kernel":
            assert min(launch["buffers"][:2]) >= 2, launch  # of numbers and of inputs
            at_once = programs_per_processor(architecture)
            assert at_once * launch["shared"] <= SHARED_MEMORY[architecture], launch
            assert registers_of(launch, at_once * 128) <= 65_536, launch
            # A thread widens one weight for each input of an iteration. If warps widened those of
            # others too, it would be four. (On 10.0 another loop of the kernel is longer.)
            if architecture < 100:
                assert launch["loop"] <= {80: 17, 90: 10}[architecture] * STEP, launch
