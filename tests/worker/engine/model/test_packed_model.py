"""The check at load: what cannot be served correctly is refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.torch_paged import TorchPaged
from promptq.worker.engine.attention.types import FULL, LayerCache, Pattern, Scoring, StepLayout
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.device import precision
from promptq.worker.engine.load_check.checked_model import CheckedModel
from promptq.worker.engine.load_check.comparison import LENGTHS
from promptq.worker.engine.load_check.formula import check_model
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.model.model_length import model_length
from promptq.worker.engine.runner.load_runner import runner_of
from tests.worker.engine.tiny_models import (
    FAMILIES,
    GPT_SHAPED,
    LATENT,
    LLAMA_SHAPED,
    make_model,
)

BERT_SHAPED = {
    name: value for name, value in LLAMA_SHAPED.items() if name not in ("head_dim", "eos_token_id")
}
HIDDEN_16 = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2}


def loaded_model(family: str, **overrides: Any) -> LoadedModel:
    return LoadedModel(family, make_model(family, **overrides), frozenset())


def check(loaded: LoadedModel, *backends: AttentionBackend) -> CheckedModel:
    return check_model(loaded, backends or [TorchPaged()], model_length(loaded, None))


def test_a_family_may_use_the_weight_of_a_linear_layer_without_calling_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the check in fp32 needs a copy of the weights."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        up = torch.nn.functional.linear(x, self.up_proj.weight)
        down: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * up)
        return down

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    loaded = loaded_model("llama")
    module: Any = loaded.model
    module.to(torch.bfloat16)
    checked = check(loaded)
    assert {spec.key_dtype for spec in checked.specs} == {torch.bfloat16}
    assert {it.dtype for it in module.parameters()} == {torch.bfloat16}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": (HIDDEN_16 | {"n_layer": 2, "n_head": 4}, "no position_ids"),
    "mamba": (HIDDEN_16, "no position_ids"),
    "rwkv": (HIDDEN_16 | {"attention_hidden_size": 16}, "no position_ids"),
    "codegen": (GPT_SHAPED | {"rotary_dim": 4}, "its attention cannot be replaced"),
    "gptj": (GPT_SHAPED | {"rotary_dim": 4}, "its attention cannot be replaced"),
    "xglm": (
        {"vocab_size": 97, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
        "its attention cannot be replaced",
    ),
    "falcon": (HIDDEN_16 | {"num_attention_heads": 4}, "its attention cannot be replaced"),
    "jamba": (
        LLAMA_SHAPED | {"num_experts": 2},
        "model.layers.0.mamba (JambaMambaMixer) remembers earlier tokens in a way that is not",
    ),
    "minimax": (
        LLAMA_SHAPED | {"layer_types": ["linear_attention", "full_attention"]},
        "model.layers.0.self_attn (MiniMaxLightningAttention) remembers earlier tokens",
    ),
    "diffllama": (LLAMA_SHAPED, "2 modules of a model of 2 layers make 4 attention calls"),
    "bert": (BERT_SHAPED, "layer 0 has no causal mask"),
    "doge": (LLAMA_SHAPED, "layer 0 adds a bias to its scores"),
    "gemma3_text": (
        FAMILIES["gemma3_text"] | {"use_bidirectional_attention": True},
        "neither causal, nor a sliding window, nor a chunk",
    ),
    "minimax_m3_vl_text": (
        LLAMA_SHAPED
        | {
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "dense"],
            "index_head_dim": 8,
            "index_block_size": 4,
        },
        "layer 1 calls its attention with the unknown argument 'block_indices'",
    ),
}


SERVED: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | {"topk_method": "greedy"},
    "glm4_moe_lite": LATENT,
    "minicpm3": LATENT,
    "bailing_hybrid": LATENT
    | {"num_hidden_layers": 2, "layer_group_size": 2, "num_experts": 4, "linear_head_dim": 8},
    "nemotron_h": FAMILIES["nemotron_h"] | {"moe_latent_size": 16},
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("family", SERVED)
def test_other_families_pass(family: str) -> None:
    """With latent attention, and with parts of the families whose tokens are compared."""
    assert check(loaded_model(family, **SERVED[family])).specs


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name_with_the_reason(family: str) -> None:
    overrides, reason = REFUSED[family]
    with pytest.raises(UnsupportedModelError) as caught:
        check(loaded_model(family, **overrides))
    message = str(caught.value)
    assert message.startswith(f"{family}: ")
    assert reason in message
    assert "\n" not in message


def test_what_mixes_rows_outside_of_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each token's MLP sees the token before it, which may be another request's."""
    forward = modeling_llama.LlamaMLP.forward

    def leaking(self: modeling_llama.LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x + 0.3 * torch.roll(x, 1, dims=1))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", leaking)
    with pytest.raises(UnsupportedModelError, match="do not get the same logits as alone"):
        check(loaded_model("llama"))


def test_a_model_with_a_custom_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that a family makes where the library would make none."""
    create = modeling_llama.create_causal_mask

    def creating(**kwargs: Any) -> torch.Tensor:
        mask: torch.Tensor | None = create(**kwargs)
        return torch.zeros(1) if mask is None else mask

    monkeypatch.setattr(modeling_llama, "create_causal_mask", creating)
    with pytest.raises(UnsupportedModelError, match="computes its own mask or bias"):
        check(loaded_model("llama"))


def test_a_layer_that_stops_calling_is_noticed() -> None:
    loaded = loaded_model("llama")
    runner = runner_of(loaded, LoadOptions(kv_cache_memory=10**6, native=False))
    runner.launch(batch_of_one())
    model: Any = loaded.model
    model.config.num_hidden_layers = 1
    with pytest.raises(UnsupportedModelError, match="1 calls in a forward of 2 attending"):
        runner.launch(batch_of_one())


class Mistaken(TorchPaged):
    """The backend, with a mistake."""

    def __init__(self, change: Callable[[Scoring], Scoring]) -> None:
        self._change = change

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        layout: StepLayout,
        scoring: Scoring,
    ) -> torch.Tensor:
        return super().attend(query, key, value, cache, layout, self._change(scoring))


def test_a_second_look_is_not_coarser(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no memory for a copy of the weights, bf16 would hide a small mistake."""
    loaded = loaded_model("llama")
    module: torch.nn.Module = loaded.model
    module.bfloat16()
    numbers = {id(it): it.numel() for it in module.parameters()}
    assert sum(numbers.values()) > 10_000
    monkeypatch.setattr(precision, "free_bytes", lambda device: 40_000)
    mistaken = Mistaken(lambda scoring: replace(scoring, scale=scoring.scale * 1.02))
    with pytest.raises(UnsupportedModelError, match="do not get the same logits as alone"):
        check(loaded, mistaken)


class Plain(TorchPaged):
    """One that knows little."""

    name = "plain"
    dtypes = frozenset({torch.float32})
    refuses = frozenset({"sliding", "chunked", "softcap", "sinks"})


@pytest.mark.parametrize(
    ("family", "unknown"),
    [
        ("mistral", "sliding"),
        ("llama4_text", "chunked"),
        ("gemma2", "sliding, softcap"),
        ("gpt_oss", "sinks"),
    ],
)
def test_a_backend_is_passed_over_for_what_it_does_not_know(family: str, unknown: str) -> None:
    loaded = loaded_model(family)
    assert check(loaded, Plain(), TorchPaged()).backend.name == "torch"
    with pytest.raises(UnsupportedModelError, match=rf"{family}: .*plain: .*support .*{unknown}"):
        check(loaded, Plain())


def test_a_backend_is_passed_over_for_a_type_it_does_not_compute_in() -> None:
    assert check(loaded_model("llama"), Plain(), TorchPaged()).backend.name == "plain"
    halves = loaded_model("llama")
    module: torch.nn.Module = halves.model
    module.bfloat16()
    assert check(halves, Plain(), TorchPaged()).backend.name == "torch"
    with pytest.raises(UnsupportedModelError, match="it does not compute in torch"):
        check(halves, Plain())


class Coarse(TorchPaged):
    """One that knows no fp32."""

    dtypes = frozenset({torch.bfloat16})

    def attend(self, query: torch.Tensor, *others: Any) -> torch.Tensor:
        assert query.dtype == torch.bfloat16
        return super().attend(query, *others)


def test_a_backend_without_fp32_is_checked_in_its_own_type() -> None:
    loaded = loaded_model("llama")
    module: torch.nn.Module = loaded.model
    module.bfloat16()
    assert isinstance(check(loaded, Coarse()).backend, Coarse)


def test_a_backend_is_asked_for_by_name() -> None:
    options = LoadOptions(kv_cache_memory=10**6, attention="torch")
    runner = runner_of(loaded_model("llama"), options)
    assert runner.why_no_own_code == "--attention torch was requested"
    with pytest.raises(
        ConfigurationError, match=r"--attention: 'best' is not one of auto, .*torch"
    ):
        runner_of(loaded_model("llama"), replace(options, attention="best"))
    with pytest.raises(ConfigurationError, match=r"--attention: 'triton' runs on cuda, .* is cpu"):
        runner_of(loaded_model("llama"), replace(options, attention="triton"))


def wider(scoring: Scoring) -> Scoring:
    pattern = scoring.pattern
    return replace(scoring, pattern=Pattern(pattern.kind, pattern.size + 1))


@pytest.mark.parametrize(
    ("family", "overrides", "mistake"),
    [
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 9999}, wider),
        ("gemma3_text", {}, wider),
        ("llama4_text", {"attention_chunk_size": 8192, "max_position_embeddings": 9999}, wider),
        ("gpt_oss", {}, lambda scoring: replace(scoring, sinks=None)),
        ("gemma2", {}, lambda scoring: replace(scoring, softcap=None)),
        ("gemma2", {}, lambda scoring: replace(scoring, scale=scoring.scale * 1.1)),
    ],
    ids=["window", "some windows", "chunk", "sinks", "softcap", "scale"],
)
def test_mistakes_are_seen(
    family: str, overrides: dict[str, Any], mistake: Callable[[Scoring], Scoring]
) -> None:
    """Also in windows of thousands of tokens, with a prompt of a few."""
    loaded = loaded_model(family, **overrides)
    check(loaded)
    with pytest.raises(UnsupportedModelError, match=f"{family}: requests in a packed step"):
        check(loaded, Mistaken(mistake))


def shifted(position_ids: torch.Tensor) -> torch.Tensor:
    if position_ids.shape[1] in LENGTHS:
        return position_ids
    return (position_ids - 1).clamp_min(0)


def stretched(position_ids: torch.Tensor) -> torch.Tensor:
    """All positions change once one of them is far along."""
    return position_ids * 2 if position_ids.max() > 100 else position_ids


@pytest.mark.parametrize(("family", "changed"), [("gpt2", shifted), ("llama", stretched)])
def test_wrong_positions_are_seen(
    family: str,
    changed: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rotary attention is relative, so a wrong offset shows only in what is learned by position."""
    loaded = loaded_model(family)
    forward = loaded.model.forward

    def wrong(*args: Any, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        return forward(*args, position_ids=changed(position_ids), **kwargs)

    monkeypatch.setattr(loaded.model, "forward", wrong)
    with pytest.raises(UnsupportedModelError, match="do not get the same logits as alone"):
        check(loaded)


def test_patterns_come_from_the_librarys_masks_and_the_true_sizes() -> None:
    kinds = [spec.pattern for spec in check(loaded_model("gemma3_text")).specs]
    assert kinds == [Pattern("sliding", 7), FULL] * 2
    kinds = [spec.pattern for spec in check(loaded_model("llama4_text")).specs]
    assert kinds == [*[Pattern("chunked", 8)] * 3, FULL]
    qwen = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    kinds = [spec.pattern for spec in check(loaded_model("qwen2", **LLAMA_SHAPED, **qwen)).specs]
    assert kinds == [FULL, Pattern("sliding", 9)]


def test_the_model_is_left_as_it_was() -> None:
    loaded = loaded_model("llama4_text")
    check(loaded)
    assert loaded.model.config.attention_chunk_size == 8
    assert {getattr(module, "floor_scale", 16) for module in loaded.model.modules()} == {16}
    loaded = loaded_model("mistral")
    with pytest.raises(UnsupportedModelError):
        check(loaded, Mistaken(wider))
    assert loaded.model.config.sliding_window == 7


def test_positions_counted_by_rows_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 scales its queries by a position that it counts itself."""
    assert check(loaded_model("llama4_text", floor_scale=8192)).counts_rows
    assert not check(loaded_model("llama4_text", attn_temperature_tuning=False)).counts_rows
    assert not check(loaded_model("ministral3")).counts_rows
    faint = loaded_model("llama4_text", floor_scale=8192, initializer_range=0.02)
    faint.model.to(torch.bfloat16)
    assert check(faint).counts_rows
    monkeypatch.setattr(precision, "_SHARE", 0.0)
    assert check(faint).counts_rows


def test_geometry_is_what_the_model_really_hands_over() -> None:
    gemma = check(loaded_model("gemma4_text")).specs
    assert [(spec.num_kv_heads, spec.key_size) for spec in gemma] == [(2, 8), (2, 16)] * 2
    assert [spec.shares_kv_of for spec in gemma] == [None, None, 0, 1]
    assert sum(spec.bytes_per_token for spec in gemma) == 4 * 2 * (8 + 8 + 16 + 16)
    deepseek = check(loaded_model("deepseek_v3")).specs
    assert [(spec.key_size, spec.value_size) for spec in deepseek] == [(16, 12)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_low_precision_passes(family: str, dtype: torch.dtype) -> None:
    loaded = loaded_model(family)
    loaded.model.to(dtype)
    weights = {name: weight.clone() for name, weight in loaded.model.state_dict().items()}
    specs = check(loaded).specs
    assert {spec.key_dtype for spec in specs} == {dtype}
    for name, weight in loaded.model.state_dict().items():
        assert weight.dtype == weights[name].dtype
        assert torch.equal(weight, weights[name])


def test_rounding_hides_no_mistake() -> None:
    loaded = loaded_model("mixtral", sliding_window=4096, initializer_range=0.02)
    loaded.model.to(torch.bfloat16)
    check(loaded)
    with pytest.raises(UnsupportedModelError, match="mixtral: requests in a packed step"):
        check(loaded, Mistaken(wider))


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "mixtral", "gemma3_text", "gpt_oss"])
def test_models_too_large_to_be_checked_in_fp32(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_SHARE", 0.0)
    loaded = loaded_model(family, initializer_range=0.1)
    loaded.model.to(torch.bfloat16)
    check(loaded)
    with pytest.raises(UnsupportedModelError, match="requests in a packed step"):
        check(loaded, Mistaken(lambda scoring: replace(scoring, scale=-scoring.scale)))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_look_at_the_whole_batch(kind: str) -> None:
    """They are served as long as no length makes them change."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    rope |= {"original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    loaded = loaded_model("llama", rope_parameters=rope)
    assert model_length(loaded, None) == 64
    assert model_length(loaded, 50) == 50
    with pytest.raises(UnsupportedModelError, match=rf"llama: .*'{kind}'.*--max-model-len 64"):
        model_length(loaded, 65)
    check(loaded)


def test_length_beyond_the_models_positions() -> None:
    with pytest.raises(ConfigurationError, match="--max-model-len: 129 is more than the 128"):
        model_length(loaded_model("llama"), 129)


def test_a_model_serves_one_cache_at_a_time() -> None:
    """A second runner takes the model over; the first one fails rather than use the wrong cache."""
    loaded = loaded_model("llama")
    first = runner_of(loaded, LoadOptions(kv_cache_memory=10**6, native=False))
    runner_of(loaded, LoadOptions(kv_cache_memory=10**6, native=False))
    step = first.packer.pack(batch_of_one())
    with pytest.raises(UnsupportedModelError, match="was not seen by the check at load"):
        first.model.logits(step, torch.tensor([0]))


def batch_of_one() -> Batch:
    sequence = Sequence.of(EngineRequest(1, [5, 6], SamplingParams(), seed=0, max_tokens=1))
    sequence.slot, sequence.block_table = 0, [0]
    return Batch([ScheduledSequence(sequence, 0, 2, samples=True)])


class CompilationError(Exception):
    """An error like Triton's: it has no standard base, and its text has the whole source before the
    reason.
    """

    def __init__(self, error_message: str | None = None) -> None:
        super().__init__(f"at 12:8:\n    key = tl.load(...)\n{error_message}")
        self.error_message = error_message


class Uncompiled(TorchPaged):
    name = "triton"

    def attend(self, *args: Any) -> torch.Tensor:
        raise CompilationError() from CompilationError("no such instruction\nanother line")


def test_kernels_that_do_not_compile_are_reported_in_one_sentence() -> None:
    told = (
        r"^--attention: the kernels of triton do not compile here \(CompilationError: no such"
        r" instruction\); --attention torch needs no compiler$"
    )
    with pytest.raises(ConfigurationError, match=told):
        check(loaded_model("llama"), Uncompiled())


def test_another_backend_serves_if_the_kernels_of_the_first_do_not_compile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = TorchPaged()
    assert check(loaded_model("llama"), Uncompiled(), plain).backend is plain
    assert "the kernels of triton do not compile here" in caplog.text
    assert "torch is tried instead" in caplog.text
