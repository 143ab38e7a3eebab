"""Recurrent layers in Triton's interpreter, or with TRITON_INTERPRET=0 on a GPU."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

from benchmarks.gpu.cases import poisoned_memory
from benchmarks.gpu.models import PaddedModel
from benchmarks.gpu.step_model import META, recorded
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention.step_buffers import StepKind
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.sequence import ScheduledSequence
from promptq.worker.engine.decoders.kernels import linear, scan
from promptq.worker.engine.decoders.kernels.fused import FusedDecoder
from promptq.worker.engine.decoders.kernels.recurrent import recurrent_layer
from promptq.worker.engine.decoders.kernels.sequences import StepSequences
from promptq.worker.engine.load_check.comparison import off_by
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.recurrent.mixer import Mixer, StateSpec
from promptq.worker.engine.recurrent.recognition import mixers_of
from promptq.worker.engine.recurrent.rows import RecurrentRows
from promptq.worker.engine.recurrent.state_pool import StatePool
from promptq.worker.engine.runner import load_runner
from promptq.worker.engine.runner.load_runner import runner_of
from tests.worker.engine.core.test_recovery import serve
from tests.worker.engine.recurrent.test_recurrent import ONE_OF_EACH_KIND, mixed, sequences_of
from tests.worker.engine.tiny_models import RECURRENT_FAMILIES, VOCAB_SIZE, generate, make_model

LENGTHS = (1, 2, 40, 16, 17, 7)
_TWO_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL = {
    "qwen3_5_text": {**_TWO_LAYERS, "layer_types": ["linear_attention", "full_attention"]},
    "bamba": {**_TWO_LAYERS, "attn_layer_indices": [1]},
    "lfm2": {**_TWO_LAYERS, "layer_types": ["conv", "full_attention"]},
    "kimi_linear": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


@pytest.fixture(autouse=True)
def scans_in_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are computed in pieces also in fp32, in which they are easier to compare."""
    if request.node.callspec.params.get("in_pieces", True):
        monkeypatch.setattr(scan, "DTYPES_IN_PIECES", {torch.bfloat16, torch.float32})


class FusedMixer(Mixer):
    """A recurrent module in fused kernels."""

    @classmethod
    def knows(cls, module: Any) -> bool:
        return False

    def __init__(self, mixer: Mixer) -> None:
        super().__init__(mixer.module)
        self._mixer = mixer

    @property
    def state(self) -> tuple[StateSpec, ...]:
        return self._mixer.state

    def mix(
        self, hidden: torch.Tensor, rows: RecurrentRows, pool: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        assert self._mixer.parts is not None
        with poisoned_memory():
            return recurrent_layer(self._mixer.parts, pool)(hidden, StepSequences.of(rows))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("in_pieces", [True, False], ids=["in pieces", "row by row"])
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
@torch.inference_mode()
def test_any_cut_gives_the_librarys_output(family: str, in_pieces: bool, seed: int) -> None:
    """Chunks have several pieces, and steps fail."""
    torch.manual_seed(seed)
    mixer = mixers_of(make_model(family, seed).to(DEVICE))[-1]
    inputs = [torch.randn(length, 32).to(DEVICE) for length in LENGTHS]
    expected = [mixer.module(each.unsqueeze(0))[0] for each in inputs]
    outputs = mixed(FusedMixer(mixer), inputs, random.Random(seed), fails=0.3)
    for output, wanted in zip(outputs, expected, strict=True):
        off = off_by(output, wanted)
        assert (float(off.median()) < 1e-5, float(off.max()) < 1e-3) == (True, True)


def random_inputs(mixer: Mixer, lengths: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = mixer.state[0].dtype
    return [torch.randn(length, 32, generator=generator).to(DEVICE, dtype) for length in lengths]


def step(
    mixer: Mixer, pool: StatePool, hidden: list[torch.Tensor], starts: list[int], num_drafted: int
) -> list[torch.Tensor]:
    """The outputs of a step. The last rows of the last sequence are drafted."""
    counts = [len(each) for each in hidden]
    drafts = [()] * (len(hidden) - 1) + [(5,) * num_drafted]
    sequences = sequences_of([start + count for start, count in zip(starts, counts, strict=True)])
    items = [
        ScheduledSequence(sequence, start, count - len(draft), samples=True, draft=draft)
        for sequence, start, count, draft in zip(sequences, starts, counts, drafts, strict=True)
    ]
    output = mixer.mix(torch.cat(hidden), pool.begin(items), pool.tensors[0])
    pool.finish(items)
    return [*output.split(counts)]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("in_pieces", [True, False], ids=["in pieces", "row by row"])
@pytest.mark.parametrize("num_drafted", [1, 3, 20])
@pytest.mark.parametrize("family", [*ONE_OF_EACH_KIND, "kimi_linear"])
@torch.inference_mode()
def test_states_do_not_include_drafted_tokens(
    family: str, num_drafted: int, in_pieces: bool, seed: int
) -> None:
    """Outputs do, though there are more drafted rows than a piece has."""
    mixer = mixers_of(make_model(family, seed).to(DEVICE))[-1]
    first, rest = random_inputs(mixer, (5, 23), seed)
    with_draft = torch.cat([rest[:2], rest[3:]])[: 2 + num_drafted]
    wanted = mixer.module(torch.cat([first, with_draft]).unsqueeze(0))[0, 5:]
    fused = FusedMixer(mixer)
    pool = StatePool([fused], 2, DEVICE)
    other = first[:1]
    step(fused, pool, [other, first], [0, 0], 0)
    drafted = step(fused, pool, [other, with_draft], [1, 5], num_drafted)[1]
    assert float(off_by(drafted, wanted).max()) < 1e-3
    after = step(fused, pool, [other, rest[2:]], [2, 7], 0)[1]
    wanted = mixer.module(torch.cat([first, rest]).unsqueeze(0))[0, 7:]
    assert float(off_by(after, wanted).max()) < 1e-3


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", ONE_OF_EACH_KIND)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the products have: here each row is multiplied by itself. In bf16, outputs are as near to
    the exact ones as those of torch."""
    plain = torch.nn.functional.linear

    def row_by_row(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        return torch.cat([plain(row, *others) for row in rows.split(1)])

    exact = mixers_of(make_model(family, seed).to(DEVICE))[-1]
    mixer = mixers_of(make_model(family, seed).to(DEVICE, torch.bfloat16))[-1]
    inputs = random_inputs(mixer, (1, 1, 3, 20), seed)
    monkeypatch.setattr(linear.nn.functional, "linear", row_by_row)
    fused = FusedMixer(mixer)
    pool, starts = StatePool([fused], len(inputs), DEVICE), [0] * len(inputs)
    outputs = step(fused, pool, inputs, starts, 0)
    off, off_in_torch = list[torch.Tensor](), list[torch.Tensor]()
    for row, output in zip(inputs, outputs, strict=True):
        alone = StatePool([fused], 1, DEVICE)
        assert torch.equal(step(fused, alone, [row], [0], 0)[0], output)
        wanted, rounded = (
            each.module(row.to(each.state[0].dtype).unsqueeze(0))[0] for each in (exact, mixer)
        )
        off.append(off_by(output.float(), wanted))
        off_in_torch.append(off_by(rounded.float(), wanted))
    assert torch.cat(off).median() < 3 * torch.cat(off_in_torch).median() + 0.01
    for tensor, of_one in zip(pool.tensors[0], alone.tensors[0], strict=True):
        assert torch.equal(tensor[7], of_one[1])


LAUNCHES = {
    "lfm2": {"mm": 2, "_convolution_kernel": 1},
    "granitemoehybrid": {
        "mm": 2,
        "_convolution_kernel": 1,
        "decode_scan_kernel": 1,
        "chunked_scan_kernel": 1,
        "_gated_norm_kernel": 1,
    },
}
LAUNCHES["qwen3_5_text"] = LAUNCHES["granitemoehybrid"]
LAUNCHES["qwen3_next"] = {**LAUNCHES["qwen3_5_text"], "index_select": 1}  # puts heads in order
LAUNCHES["falcon_h1"] = {**LAUNCHES["granitemoehybrid"], "mul_": 1}


@pytest.mark.parametrize("family", LAUNCHES)
def test_launches_of_a_layer(family: str) -> None:
    """They are few in a step with a decode and a chunk, and none waits for data."""
    mixer = mixers_of(make_model(family).to(META))[-1]
    pool = StatePool([mixer], 2, META)
    rows = pool.begin(
        [ScheduledSequence(each, 0, each.num_tokens, True) for each in sequences_of([1, 5])]
    )
    sequences = StepSequences.of(rows)
    assert mixer.parts is not None
    layer = recurrent_layer(mixer.parts, pool.tensors[0])
    with recorded() as recorder:
        assert layer(torch.empty(6, 32, device=META), sequences).shape == (6, 32)
    assert recorder.counts == LAUNCHES[family]


# Rows that only fill up a step are not written, and numpy warns of what lay there.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.matrix(1)
@pytest.mark.parametrize("is_padded", [False, True], ids=["as they are", "padded"])
@pytest.mark.parametrize("family", SMALL)
def test_a_runner_makes_the_librarys_tokens(
    family: str, is_padded: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, after a shared prefix, and with drafts. The CPU is in the place of a card. CUDA
    graphs run padded steps."""
    monkeypatch.setattr(load_runner, "backends_on", lambda *_: [TritonPaged()])
    monkeypatch.setattr(load_runner, "own_decoders", lambda *_: ([FusedDecoder], ""))
    rng = random.Random(seed)
    prefix = [rng.randrange(3, VOCAB_SIZE) for _ in range(9)]
    prompts = {n: prefix + [rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 3)}
    model = make_model(family, seed, **SMALL[family])
    expected = {n: generate(model, prompt, 4) for n, prompt in prompts.items()}
    model.requires_grad_(False).to(DEVICE)
    options = LoadOptions(
        block_size=4, kv_cache_memory=200_000, max_model_len=18, max_num_seqs=3, cuda_graphs=False
    )
    runner = runner_of(LoadedModel("tiny", model, frozenset()), options)
    assert runner.why_no_own_code == ""
    if is_padded:
        runner.model = PaddedModel(
            runner.model,
            [StepKind(2), StepKind(4), StepKind(16, is_mixed=True)],
            max_num_seqs=3,
            max_model_len=18,
            block_size=4,
            device=DEVICE,
            states=runner.states,
        )
    drafts = SamplingParams(temperature=0.0, speculative_tokens=3)
    engine = LLMEngine(
        runner, max_num_seqs=3, max_num_batched_tokens=12, prefill_chunk=7, speculative_tokens=3
    )
    requests = [
        EngineRequest(n, prompt, drafts, seed=0, max_tokens=4) for n, prompt in prompts.items()
    ]
    tokens, _ = serve(engine, requests)
    assert tokens == expected
    assert engine.stats.cached_tokens > 0
