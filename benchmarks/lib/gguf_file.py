"""Writes a model of the Qwen3 kind as a GGUF file, which llama.cpp reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
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
}


def gguf_file(
    model: Path, gguf_package: Path, format: str = "BF16", *, folder: Path | None = None
) -> Path:
    """The file, written beside the weights or into `folder` once; `gguf_package` comes with
    llama.cpp.

    `format` is F32, BF16, Q8_0 or Q4_0. Norms are always in fp32. Beside Q4_0 the embedding, which
    is the output layer too, is in Q8_0, as ours is in int8 beside int4.
    """
    file = (folder or model) / f"model-{format}.gguf"
    if not file.exists():
        sys.path.insert(0, str(gguf_package))
        unfinished = file.with_name(f"unfinished-{format}.gguf")
        _write(model, unfinished, format)
        unfinished.rename(file)
    return file


def gguf_name(name: str) -> str:
    """A tensor's name there: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.weight"
    return f"{_NAMES[stem]}.weight"


def _write(model: Path, file: Path, format: str) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType, quants
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    writer = GGUFWriter(str(file), "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(LlamaFileType["ALL_F32" if format == "F32" else f"MOSTLY_{format}"])

    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {it["content"]: it["id"] for it in tokenizer["added_tokens"]}
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

    for name, tensor in load_file(model / "model.safetensors").items():
        numbers = tensor.float().numpy()
        if format == "F32" or tensor.dim() == 1:  # llama.cpp keeps the norms in fp32
            writer.add_tensor(gguf_name(name), numbers)
        else:
            is_embedding = "embed_tokens" in name
            kind = GGMLQuantizationType["Q8_0" if format == "Q4_0" and is_embedding else format]
            writer.add_tensor(gguf_name(name), quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
