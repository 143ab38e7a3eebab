"""Drafts by a model's own head change no token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpLayer

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest, EngineStats
from promptq.worker.engine.checkpoints.model_folder import ModelFolder
from promptq.worker.engine.core.drafting import DraftTimes
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.decoders.head_parts import DraftStep
from promptq.worker.engine.model.draft_heads import _work, load_head
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner import head_drafts
from promptq.worker.engine.runner.load_runner import load_runner
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.shipped import MODEL_DIR
from tests.worker.engine.tiny_models import VOCAB_SIZE, make_model

SEED = 5
GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 4
IN_A_LAYER = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "post_norm": "shared_head.norm",
}
"""Names of a head's parts in the checkpoints of DeepSeek V3 and GLM 4.5."""
OF_QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}
RECURRENT = ["qwen3_next", "qwen3_5_text"]


def save_with_head(directory: Path, family: str, *, agrees: bool = False) -> Path:
    """A random model of a family, with a random head in the format of published checkpoints."""
    model = make_model(family, SEED)
    config = model.config
    config.num_mtp_layers = 1
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None):
            setattr(config, f"mtp_{name}", [getattr(config, name)[-1]])
    generator = torch.Generator().manual_seed(SEED)
    kinds = type(model.model.layers[-1]), type(model.model.norm)
    head = MtpLayer(config.get_mtp_config(), *kinds, 0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        if agrees:
            make_agree(model, head)
    # The library's `save_pretrained` splits experts into the tensors of published checkpoints.
    block = make_model(family, SEED)
    block.model.layers[-1].load_state_dict(head.mtp_block.state_dict())
    block.save_pretrained(directory)
    is_of_qwen = family in RECURRENT
    last = f"model.layers.{config.num_hidden_layers - 1}."
    added = "mtp." if is_of_qwen else f"model.layers.{config.num_hidden_layers}."
    layer = f"{added}layers.0." if is_of_qwen else added
    tensors = {
        name.replace(last, layer): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
        if name.startswith(last)
    }
    for part, name in (OF_QWEN if is_of_qwen else IN_A_LAYER).items():
        tensors[f"{added}{name}.weight"] = getattr(head, part).weight.detach()
    model.save_pretrained(directory)
    whole = {**load_file(directory / "model.safetensors"), **tensors}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_agree(model: Any, head: MtpLayer) -> None:
    """Let the next token mostly follow from the last one, for the model and its head of Qwen."""
    for module in (model, head):
        for name, parameter in module.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                parameter.mul_(0.002)
    size = model.config.hidden_size
    head.eh_proj.weight.copy_(torch.cat([torch.eye(size), 0.05 * torch.eye(size)], dim=1))
    head.enorm.weight.zero_()  # one is added
    head.hnorm.weight.zero_()
    assert head.post_norm is not None
    head.post_norm.weight.copy_(model.model.norm.weight)


def load(directory: Path, *, drafts: bool, num_blocks: int = 200, **options: Any) -> ModelRunner:
    def runner(memory: int | None) -> ModelRunner:
        given = {"dtype": "float32", "kv_cache_memory": memory, "drafts": drafts, **options}
        return load_runner(
            str(directory),
            LoadOptions(device="cpu", block_size=BLOCK_SIZE, max_num_seqs=4, **given),
        )

    layout = runner(None).kv_layout
    return runner(num_blocks * BLOCK_SIZE * layout.bytes_per_token + layout.state_bytes)


def requests_of(prompts: list[list[int]], max_tokens: int = 40) -> list[EngineRequest]:
    """Greedy ones and seeded ones."""
    return [
        EngineRequest(
            index,
            prompt,
            SamplingParams(temperature=(0.0, 0.8)[index % 2], top_p=0.95),
            seed=index,
            max_tokens=max_tokens + index,
            order=(index, ""),
        )
        for index, prompt in enumerate(prompts)
    ]


def run(
    runner: ModelRunner, requests: list[EngineRequest], *, every: int = 1, **options: Any
) -> tuple[list[list[int]], EngineStats]:
    """Add a request every few steps, and step until done. A step that raises is recovered."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "speculative_tokens": 7, **options}
    engine = LLMEngine(runner, **options)
    outputs: dict[int, list[int]] = {request.sequence_id: [] for request in requests}
    waiting, num_steps = list(requests), 0
    while waiting or engine.has_work:
        if waiting and num_steps % every == 0:
            engine.add(waiting.pop(0))
        try:
            step = engine.step()
        except FaultError as error:
            step = engine.recover(error)
        for output in step.outputs:
            outputs[output.sequence_id] += output.token_ids
        engine.check_integrity()
        num_steps += 1
    return [outputs[request.sequence_id] for request in requests], engine.stats


class FaultError(Exception):
    """Raised on purpose."""


class Faulty:
    """Raises at each `period`-th call of a method, by turns before the call and after it."""

    def __init__(self, method: Callable[..., Any], period: int) -> None:
        self._method = method
        self._period = period
        self.num_calls = 0
        self.num_faults = 0

    def __call__(self, *arguments: Any) -> Any:
        self.num_calls += 1
        if self.num_calls % self._period == 0:
            self.num_faults += 1
            if self.num_faults % 2 == 0:
                self._method(*arguments)
            raise FaultError
        return self._method(*arguments)


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEED)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("method", "period"), [("draft", 2), ("draft", 1), ("logits_and_states", 7)]
)
@pytest.mark.usefixtures("costless")
def test_steps_that_fail_change_no_token(method: str, period: int, tmp_path: Path) -> None:
    """Whether the head raises or the model does. A head that always raises ends no request."""
    directory = save_with_head(tmp_path, "llama")
    requests = requests_of(prompts_of(1, 13, 30, 6))
    expected, _ = run(load(directory, drafts=False), requests, speculative_tokens=0)
    runner: Any = load(directory, drafts=True)
    faulty = Faulty(getattr(runner.model, method), period)
    setattr(runner.model, method, faulty)
    outputs, stats = run(runner, requests)
    assert outputs == expected
    assert faulty.num_faults >= 3
    assert period == 1 or stats.drafted_tokens > 0


@pytest.mark.usefixtures("costless")
def test_held_states_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests are cancelled. Each step has at most 8 rows of a request."""
    monkeypatch.setattr(head_drafts, "MOST_HELD", 8)
    directory = save_with_head(tmp_path, "llama")
    requests = requests_of(prompts_of(30, 50, 9, 40))
    expected, _ = run(load(directory, drafts=False), requests, speculative_tokens=0)
    runner: Any = load(directory, drafts=True)
    engine = LLMEngine(
        runner, max_num_seqs=4, max_num_batched_tokens=40, prefill_chunk=5, speculative_tokens=7
    )
    outputs: dict[int, list[int]] = {request.sequence_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    cancelled: set[int] = set()
    num_steps, most_rows = 0, 0
    while engine.has_work:
        if num_steps in (3, 20):
            cancelled.add(num_steps % 3)
            assert engine.abort(num_steps % 3)
        for output in engine.step().outputs:
            outputs[output.sequence_id] += output.token_ids
        engine.check_integrity()
        held = runner._drafts._held
        num_bytes = sum(each.states.untyped_storage().nbytes() for each in held)
        most_rows = max(most_rows, num_bytes // (4 * 32))
        num_steps += 1
    assert cancelled == {0, 2}
    assert 8 <= most_rows < 8 + 4 * 8
    for index, tokens in outputs.items():
        assert tokens == expected[index][: len(tokens)]
        assert (len(tokens) == len(expected[index])) == (index not in cancelled)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
@pytest.mark.usefixtures("costless")
def test_drafts_change_no_token_in_bf16(family: str, tmp_path: Path) -> None:
    directory = save_with_head(tmp_path, family)
    requests = requests_of(prompts_of(1, 13, 30, 6))
    expected, _ = run(
        load(directory, drafts=False, dtype="bfloat16"), requests, speculative_tokens=0
    )
    runner = load(directory, drafts=True, dtype="bfloat16")
    assert runner.why_no_head == ""
    for options in ({}, {"max_num_seqs": 1}, {"every": 3, "prefill_chunk": 5}):
        outputs, stats = run(runner, requests, **options)
        assert outputs == expected
        assert stats.drafted_tokens > 0


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("family", "native"),
    [
        *(("llama", True), ("qwen3", True), ("glm4_moe", True)),
        *(("glm4_moe", False), ("deepseek_v3", False), ("deepseek_v3", True)),
        ("qwen3_next", True),
    ],
)
@pytest.mark.usefixtures("costless")
def test_a_head_of_any_quality_changes_no_token(family: str, native: bool, tmp_path: Path) -> None:
    """Alone, in company, in chunks, and preempted. The drafts of a random head are wrong."""
    directory = save_with_head(tmp_path, family)
    generator = torch.Generator().manual_seed(SEED)
    lengths = (1, 13, 30, 6, 21, 2)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]
    requests = requests_of(prompts)
    expected, _ = run(load(directory, drafts=False, native=native), requests, speculative_tokens=0)
    runner = load(directory, drafts=True, native=native)
    assert runner.why_no_head == ""
    assert (runner.why_no_own_code == "") == native
    for options in (
        {"max_num_seqs": 1},
        {"every": 3},
        {"prefill_chunk": 5},
        {"speculative_tokens": 2, "every": 7},
    ):
        outputs, stats = run(runner, requests, **options)
        assert outputs == expected
        assert stats.drafted_tokens > stats.accepted_tokens
    small = load(directory, drafts=True, native=native, num_blocks=40)
    outputs, stats = run(small, requests)
    assert outputs == expected
    assert stats.num_preemptions > 0
    assert stats.drafted_tokens > 0


class Recorder:
    """A head that remembers its drafts, by the tokens before them."""

    def __init__(self, head: Any) -> None:
        self.head = head
        self.drafts: dict[tuple[int, ...], list[int]] = {}

    def draft(self, step: DraftStep) -> torch.Tensor:
        tokens: torch.Tensor = self.head.draft(step)
        for index, (sequence, count) in enumerate(zip(step.sequences, step.counts, strict=True)):
            if sequence.request.params.temperature == 0.0:
                self.drafts[tuple(sequence.token_ids)] = tokens[:count, index].tolist()
        return tokens


@torch.inference_mode()
def drafts_of_library(directory: Path, token_ids: list[int], count: int) -> list[int]:
    """Greedy drafts by the library's modules, over the whole text and without a cache."""
    library: Any = AutoModelForCausalLM
    model = library.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    files = ModelFolder(str(directory), False)
    loaded = load_head(model, files.head_weights(files.head_files()))
    head: Any = loaded.module
    head.config._attn_implementation = "eager"
    states = model.model(torch.tensor([token_ids])).last_hidden_state[:, :-1]
    text = list(token_ids)
    for _ in range(count):
        embedded = model.get_input_embeddings()(torch.tensor([text[1:]]))
        places = torch.arange(1, len(text)).unsqueeze(0)
        hidden = head(
            embedded,
            states,
            position_embeddings=model.model.rotary_emb(embedded, position_ids=places),
            attention_mask=torch.full((len(text) - 1,) * 2, -torch.inf).triu(1)[None, None],
            position_ids=places,
            past_key_values=None,
        )
        states = torch.cat([states, hidden[:, -1:]], dim=1)
        text.append(int(model.lm_head(hidden[:, -1]).argmax()))
    return text[len(token_ids) :]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("family", "native"),
    [
        *(("llama", True), ("qwen3", True), ("glm4_moe", True)),
        *(("llama", False), ("deepseek_v3", False), ("deepseek_v3", True)),
    ],
)
@pytest.mark.usefixtures("costless")
def test_drafts_are_those_of_the_library(family: str, native: bool, tmp_path: Path) -> None:
    """Prompts come in chunks, and requests beside each other. One prefix is cached."""
    directory = save_with_head(tmp_path, family)
    generator = torch.Generator().manual_seed(SEED)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (5, 21, 9, 34)
    ]
    prompts.append([*prompts[1], 7, 8])
    runner: Any = load(directory, drafts=True, native=native)
    assert runner.why_no_head == ""
    recorder = runner._drafts._head = Recorder(runner._drafts._head)
    run(runner, requests_of(prompts, max_tokens=12), every=2, prefill_chunk=8)
    assert len(recorder.drafts) >= 8
    assert max(map(len, recorder.drafts.values())) > 2
    for token_ids, drafted in recorder.drafts.items():
        assert drafted == drafts_of_library(directory, [*token_ids], len(drafted))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.usefixtures("costless")
def test_drafts_of_recurrent_models(family: str, tmp_path: Path) -> None:
    """Drafts are those of the library, also after accepted ones, whose states the next step
    computes again. They change no token."""
    directory = save_with_head(tmp_path, family, agrees=True)
    generator = torch.Generator().manual_seed(SEED)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (5, 21, 9, 34, 3, 12, 27, 8)
    ]
    requests = [
        EngineRequest(index, prompt, GREEDY, seed=0, max_tokens=16, order=(index, ""))
        for index, prompt in enumerate(prompts)
    ]
    expected, _ = run(load(directory, drafts=False), requests, speculative_tokens=0)
    runner: Any = load(directory, drafts=True)
    assert runner.why_no_head == ""
    recorder = runner._drafts._head = Recorder(runner._drafts._head)
    outputs, stats = run(runner, requests, every=2, prefill_chunk=8)
    assert outputs == expected
    assert stats.drafted_tokens > stats.accepted_tokens > stats.drafted_tokens / 3
    assert len(recorder.drafts) >= 8
    for token_ids, drafted in recorder.drafts.items():
        assert drafted == drafts_of_library(directory, [*token_ids], len(drafted))


def test_the_librarys_recurrent_modules_have_no_head(tmp_path: Path) -> None:
    runner = load(save_with_head(tmp_path, "qwen3_5_text"), drafts=True, native=False)
    assert "recurrent" in runner.why_no_head
    assert runner.abilities.head_work is None


def test_the_head_of_the_shipped_model_drafts_most_of_a_story(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a usual temperature, if drafts cost little. No token changes."""
    monkeypatch.setattr(DraftTimes, "cost", lambda times, length: 1 + length / 5)
    options = LoadOptions(device="cpu", max_num_seqs=1, kv_cache_memory=2**24)
    runner = load_runner(str(MODEL_DIR), options)
    assert runner.why_no_head == ""
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_DIR)
    params = SamplingParams(temperature=0.8)
    prompts = [tokenizer(text)["input_ids"] for text in ("Once upon a time", "A little fox")]
    outputs = []
    for count in (0, 7):
        requests = [
            EngineRequest(index, prompt, params, seed=index, max_tokens=200)
            for index, prompt in enumerate(prompts)
        ]
        texts, stats = run(runner, requests, max_num_seqs=1, speculative_tokens=count)
        outputs.append(texts)
    assert outputs[0] == outputs[1]
    assert stats.accepted_tokens > stats.generation_tokens / 2
    assert stats.accepted_tokens > stats.drafted_tokens / 2


def test_four_stories_are_those_of_one_at_a_time() -> None:
    """With greedy choices. The head drafts for both until it has measured whether drafts pay."""
    options = LoadOptions(device="cpu", max_num_seqs=4, kv_cache_memory=2**24)
    runner = load_runner(str(MODEL_DIR), options)
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_DIR)
    openings = ("Once upon a time", "A little fox", "In the forest", "One day, the old baker")
    requests = [
        EngineRequest(index, tokenizer(text)["input_ids"], GREEDY, seed=0, max_tokens=100)
        for index, text in enumerate(openings)
    ]
    expected, _ = run(runner, requests, speculative_tokens=0)
    alone, of_one = run(runner, requests, max_num_seqs=1)
    together, of_four = run(runner, requests, max_num_batched_tokens=512)
    assert alone == together == expected
    assert of_one.accepted_tokens > 0
    assert of_four.accepted_tokens > 0


def test_kv_of_the_head_is_counted(tmp_path: Path) -> None:
    """The head is one more layer."""
    directory = save_with_head(tmp_path, "llama")
    with_head, without = (
        load(directory, drafts=drafts).kv_layout.bytes_per_token for drafts in (True, False)
    )
    assert with_head * 2 == without * 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda weights: weights.pop("model.layers.2.eh_proj.weight"), "are missing"),
        (
            lambda weights: weights.update({"model.layers.2.hnorm.weight": torch.zeros(3)}),
            "misshaped",
        ),
        (lambda weights: [weights.pop(each) for each in [*weights] if ".2." in each], ""),
    ],
)
def test_a_head_that_is_not_whole_is_left_out_with_the_reason(
    change: Callable[[dict[str, torch.Tensor]], Any], reason: str, tmp_path: Path
) -> None:
    directory = save_with_head(tmp_path, "llama")
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    runner = load(directory, drafts=True)
    assert runner.abilities.head_work is None
    assert reason in runner.why_no_head
    assert bool(reason) == bool(runner.why_no_head)


def test_a_head_that_is_refused_reserves_nothing(tmp_path: Path) -> None:
    """All K and V are the model's."""
    directory = save_with_head(tmp_path, "llama")
    config = json.loads((directory / "config.json").read_text())
    config["mtp_hidden_states_first"] = True
    (directory / "config.json").write_text(json.dumps(config))
    memory = 200_000
    runner = load(directory, drafts=True, kv_cache_memory=memory)
    assert "hidden states come first" in runner.why_no_head
    assert runner.abilities.head_work is None
    without = load(directory, drafts=False, kv_cache_memory=memory)
    assert runner.kv_layout == without.kv_layout


def test_a_head_of_quantized_weights_is_not_read(tmp_path: Path) -> None:
    directory = save_with_head(tmp_path, "llama")
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name and "eh_proj" not in name]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    saved = ModelFolder(str(directory), False).quantized_weights(torch.float32)
    assert saved is not None
    assert {name.split(".")[2] for name in saved.tensors if ".layers." in name} == {"0", "1"}
    runner = load(directory, drafts=True)
    assert runner.saved_format
    assert runner.why_no_head == "its weights are quantized"


def test_a_damaged_file_of_a_head_stops_no_start(tmp_path: Path) -> None:
    directory = save_with_head(tmp_path, "llama")
    weights = load_file(directory / "model.safetensors")
    of_head = [name for name in weights if ".2." in name]
    for name in of_head:
        weights.pop(name)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "mtp").mkdir()
    (directory / "mtp" / "head.safetensors").write_bytes(b"\x08" + bytes(7) + b"no json!")
    runner = load(directory, drafts=True)
    assert runner.abilities.head_work is None
    assert runner.why_no_head


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
def test_a_token_needs_few_of_the_experts(family: str) -> None:
    """The head has one layer with experts, the model has several. Convolutions have weights of
    three dimensions, too."""
    model: Any = make_model(family, SEED)
    config = model.config
    used = config.num_experts_per_tok / config.num_experts
    output: int = model.lm_head.weight.numel()

    def work_of(module: nn.Module) -> float:
        return output + sum(
            weight.numel() * (used if ".experts." in f".{name}" else 1)
            for name, weight in module.named_parameters()
        )

    expected = work_of(model.model.layers[-1]) / work_of(model.model.layers)
    assert _work(model, model.model.layers[-1]) == pytest.approx(expected)
