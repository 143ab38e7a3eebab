"""Writes a model of the benchmarks as a GGUF file, which llama.cpp reads."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "score": "cls.output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_MORE_NAMES = {
    "gemma3_text": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "qwen3_5_text": {
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
    },
}
_ARCHITECTURES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
}


def gguf_file(
    model: Path, gguf_package: Path, format: str = "BF16", *, folder: Path | None = None
) -> Path:
    """Write the model as a GGUF file, unless the file exists, and return its path. The file is
    beside the weights or in `folder`. `gguf_package` comes with llama.cpp.

    `format` is F32, BF16, Q8_0 or Q4_0. Norms and other small tensors are always in fp32. With
    Q4_0, the embedding, which is also the output layer, is in Q8_0, just as promptq's is in int8
    with int4.
    """
    file = (folder or model) / f"model-{format}.gguf"
    if not file.exists():
        sys.path.insert(0, str(gguf_package))
        unfinished = file.with_name(f"unfinished-{format}.gguf")
        _write(model, unfinished, format)
        unfinished.rename(file)
    return file


def gguf_name(name: str, family: str = "qwen3") -> str:
    """Returns a tensor's name in GGUF: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    names = {**_NAMES, **_MORE_NAMES.get(family, {})}
    stem, ending = (name[:-7], ".weight") if name.endswith(".weight") else (name, "")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{names[part]}{ending}"
    return f"{names[stem]}{ending}"


def _write(model: Path, file: Path, format: str) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType, quants
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    family: str = config["model_type"]
    writer = GGUFWriter(str(file), _ARCHITECTURES[family])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rotation = config["rope_parameters"]
    writer.add_rope_freq_base(rotation.get("full_attention", rotation)["rope_theta"])
    _add_sizes_of_family(writer, family, config)
    if config["architectures"][0].endswith("ForSequenceClassification"):
        labels = [*config.get("id2label", "01")]
        writer.add_array(f"{_ARCHITECTURES[family]}.classifier.output_labels", labels)
        writer.add_string("tokenizer.chat_template.rerank", "{query} {document}")
    writer.add_file_type(LlamaFileType["ALL_F32" if format == "F32" else f"MOSTLY_{format}"])

    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    tokens = sorted({**vocabulary, **special}, key={**vocabulary, **special}.__getitem__)
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(config["eos_token_id"])

    for name, tensor in _tensors(load_file(model / "model.safetensors"), family):
        numbers = tensor.float().numpy()
        if format == "F32" or _is_small(name, tensor):
            writer.add_tensor(gguf_name(name, family), numbers)
        else:
            is_embedding = "embed_tokens" in name
            kind = GGMLQuantizationType["Q8_0" if format == "Q4_0" and is_embedding else format]
            quantized = quants.quantize(numbers, kind)
            writer.add_tensor(gguf_name(name, family), quantized, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes_of_family(writer: Any, family: str, config: dict[str, Any]) -> None:
    if family == "qwen3_moe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    elif family == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
    elif family == "qwen3_5_text":
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
        rotated = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
        writer.add_rope_dimension_count(rotated)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        num_heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(num_heads)
        writer.add_ssm_inner_size(num_heads * size)


def _tensors(weights: dict[str, torch.Tensor], family: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights as llama.cpp stores them: experts in one tensor, norms with their 1."""
    import torch

    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in weights.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
        elif name.endswith("A_log"):
            yield name, -tensor.float().exp()
        elif name.endswith("conv1d.weight"):
            yield name, tensor.squeeze(1)
        elif family in _MORE_NAMES and "norm" in name and "linear_attn" not in name:
            yield name, tensor.float() + 1
        else:
            yield name, tensor
    for name, parts in experts.items():
        yield name, torch.stack([parts[expert] for expert in sorted(parts)])


def _is_small(name: str, tensor: torch.Tensor) -> bool:
    """Returns whether llama.cpp keeps a tensor in fp32."""
    return tensor.dim() == 1 or name.endswith(("mlp.gate.weight", "conv1d.weight"))
