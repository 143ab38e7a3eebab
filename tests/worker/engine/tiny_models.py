"""Tiny random models of many families, saved as directories that the engine can load."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.torch_paged import TorchPaged
from promptq.worker.engine.load_check.checked_model import CheckedModel
from promptq.worker.engine.load_check.formula import check_model
from promptq.worker.engine.model.loading import LoadedModel

VOCAB_SIZE = 97

LLAMA_SHAPED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GPT_SHAPED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED_LAYERS = {
    "num_hidden_layers": 4,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

GATED_DELTA_NET = {
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
}
LATENT: dict[str, Any] = {  # keys and values of different sizes
    **LLAMA_SHAPED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
LATENT_FAMILIES: dict[str, dict[str, Any]] = {  # with a rotation of each kind
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": {**LATENT, "q_lora_rank": None, "rope_interleave": False},
    "minicpm3": LATENT,
}
LONGCAT: dict[str, Any] = {  # each layer attends twice
    **LATENT,
    "num_layers": 2,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 24,
    "moe_topk": 2,
    "zero_expert_num": 2,
}
LFM2: dict[str, Any] = {
    **LLAMA_SHAPED,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2,
    "conv_L_cache": 3,
    "conv_bias": True,
}
RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**LLAMA_SHAPED, **GATED_DELTA_NET, **EXPERTS},
    "qwen3_5_text": {**LLAMA_SHAPED, **GATED_DELTA_NET},
    "qwen3_5_moe_text": {**LLAMA_SHAPED, **GATED_DELTA_NET, **EXPERTS},
    "olmo_hybrid": {**LLAMA_SHAPED, **GATED_DELTA_NET, "linear_allow_neg_eigval": True},
    "kimi_linear": {
        **LATENT,
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
    },
    "granitemoehybrid": {
        **LLAMA_SHAPED,
        **MAMBA_2,
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
    "bamba": {**LLAMA_SHAPED, **MAMBA_2, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "falcon_h1": {  # each layer attends and is recurrent
        **LLAMA_SHAPED,
        **MAMBA_2,
        "mamba_d_ssm": 64,
        "mamba_rms_norm": True,
        "embedding_multiplier": 1.7,
        "attention_in_multiplier": 0.8,
        "key_multiplier": 1.4,
        "attention_out_multiplier": 1.2,
        "ssm_in_multiplier": 1.5,
        "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 1.1],
        "ssm_out_multiplier": 0.6,
        "mlp_multipliers": [1.6, 0.9],
        "lm_head_multiplier": 0.7,
    },
    "nemotron_h": {  # a block is recurrent, attends, or has an MLP or experts
        **LLAMA_SHAPED,
        "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "mlp", "attention", "mamba", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "lfm2": LFM2,
}
PARTIAL_ROTATION = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

_MIXTURE = {**LLAMA_SHAPED, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_MIXTURE, "num_experts": 8, "norm_topk_prob": True},
    "mixtral": {**_MIXTURE, "num_local_experts": 8, "sliding_window": None},
    "olmoe": {**_MIXTURE, "num_experts": 8, "norm_topk_prob": False},
    "qwen2_moe": {
        **_MIXTURE,
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
    },
    "glm4_moe": {
        **_MIXTURE,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
    "gpt_oss": {
        **LLAMA_SHAPED,
        **MIXED_LAYERS,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_limit": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "flex_olmo": {**_MIXTURE, "num_experts": 8, "norm_topk_prob": True},
    "minimax_m2": {**_MIXTURE, "num_local_experts": 8},
    "ernie4_5_moe": {
        **_MIXTURE,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "phimoe": {
        **_MIXTURE,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.1,
    },
    "granitemoe": {**_MIXTURE, "num_local_experts": 8},
    "exaone_moe": {
        **_MIXTURE,
        **MIXED_LAYERS,
        "sliding_window_pattern": None,
        "num_experts": 8,
    },
    "flint": {**_MIXTURE, **MIXED_LAYERS, "num_experts": 8},
    "cohere2_moe": {**_MIXTURE, **MIXED_LAYERS, "num_experts": 8},
    "hunyuan_v1_moe": {**LLAMA_SHAPED, "num_experts": 8, "moe_topk": 3},
    "lfm2_moe": {
        **LFM2,
        **_MIXTURE,
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_dense_layers": 1,
    },
}
"""Mixtures of experts, with all that their routers may have."""

FAMILIES: dict[str, dict[str, Any]] = {
    **MIXTURES,
    "llama": LLAMA_SHAPED,
    "qwen3": LLAMA_SHAPED,
    "gpt2": GPT_SHAPED,
    "mistral": {**LLAMA_SHAPED, "sliding_window": 7},
    "gemma2": {
        **LLAMA_SHAPED,
        **MIXED_LAYERS,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {  # two tables of rotations
        **LLAMA_SHAPED,
        **MIXED_LAYERS,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 8,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        },
    },
    "olmo2": LLAMA_SHAPED,
    "olmo3": {**LLAMA_SHAPED, **MIXED_LAYERS},
    "granite": {
        **LLAMA_SHAPED,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 1.7,
        "mlp_bias": True,
        "attention_bias": True,
    },
    "glm4": LLAMA_SHAPED,
    "phi3": {**LLAMA_SHAPED, "sliding_window": 7, "rope_parameters": PARTIAL_ROTATION},
    "smollm3": {**LLAMA_SHAPED, "no_rope_layers": [1, 0]},
    "ernie4_5": {**LLAMA_SHAPED, "use_bias": True},
    "hunyuan_v1_dense": LLAMA_SHAPED,
    "exaone4": {**LLAMA_SHAPED, **MIXED_LAYERS, "sliding_window_pattern": None},
    "nemotron": {**LLAMA_SHAPED, "mlp_bias": True},
    "arcee": {**LLAMA_SHAPED, "mlp_bias": True},
    "apertus": {
        **LLAMA_SHAPED,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "cohere2": {**LLAMA_SHAPED, **MIXED_LAYERS},
    "helium": LLAMA_SHAPED,
    "starcoder2": LLAMA_SHAPED,
    "llama4_text": {
        **LLAMA_SHAPED,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": [*["chunked_attention"] * 3, "full_attention"],
        "floor_scale": 16,
    },
    "phi": {**LLAMA_SHAPED, "partial_rotary_factor": 0.5},
    "gpt_neox": {**LLAMA_SHAPED, "rotary_pct": 0.5},
    "ministral3": {
        **LLAMA_SHAPED,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "gemma4_text": {  # heads of two sizes, and layers that share K and V
        **LLAMA_SHAPED,
        **MIXED_LAYERS,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "attention_k_eq_v": True,
        "use_double_wide_mlp": True,
    },
    **LATENT_FAMILIES,
    "longcat_flash": LONGCAT,
    "gpt_bigcode": GPT_SHAPED,
    "opt": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "init_std": 0.3,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    **RECURRENT_FAMILIES,
}


NATIVE = {
    *("llama", "qwen3", "mistral", "phi", "gemma2", "gemma3_text", "olmo2", "olmo3", "granite"),
    *("glm4", "phi3", "smollm3", "ernie4_5", "hunyuan_v1_dense", "exaone4", "nemotron", "arcee"),
    *("cohere2", "helium", "starcoder2"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "granitemoehybrid"),
    *("bamba", "lfm2", "falcon_h1", "nemotron_h", "gemma4_text", "apertus"),
    *MIXTURES,
    *LATENT_FAMILIES,
    "kimi_linear",
}
"""Families of which all parts have native code."""


def check_on_torch(loaded: LoadedModel, backend: AttentionBackend, max_length: int) -> CheckedModel:
    """Check a model on torch's attention, for a test of something else on `backend`.

    In Triton's interpreter, the check takes seconds.
    """
    return replace(check_model(loaded, [TorchPaged()], max_length), backend=backend)


def make_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in fp32, the same for the same arguments.

    Attention is eager, as it is the one that always honours softcap and sinks. No weight, be it a
    norm's, a bias or a sink, has the value that would hide a mistake.
    """
    config = AutoConfig.for_model(family, **{**FAMILIES.get(family, {}), **overrides})
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of families that are behind the library they are in
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    return model.eval()


def mixture_of(model: Any) -> Any:
    """Returns the experts and router of the last layer."""
    layer = model.model.layers[-1]
    names = ("block_sparse_moe", "feed_forward", "mixer", "mlp")
    return next(getattr(layer, name) for name in names if hasattr(layer, name))


def assert_near(y: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare results of experts. The largest result sets the tolerance, because a small result may
    be a sum of large terms."""
    largest = float(wanted.abs().max())
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5 * max(1.0, largest))


def save_model(directory: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """Saves a tiny model as a directory."""
    make_model(family, seed, **overrides).save_pretrained(directory)
    return directory


@torch.inference_mode()
def generate(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Returns the tokens of the library's greedy decoding, which ignores end tokens."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
