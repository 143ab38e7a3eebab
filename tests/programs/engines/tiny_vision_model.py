"""Saves a Qwen3-VL with random weights and the shipped model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from promptq.worker.shipped import MODEL_DIR

TOKENS_OF_PICTURE = 4
"""Of a picture of 64 times 64 pixels: one for each square of 32 times 32."""
_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def save_vision_model(folder: Path) -> Path:
    """Saves the model and the files of its processor in `folder`. Returns the folder."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKS)})
    tokenizer.chat_template = _TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(_MARKS))
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 2112,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_parameters": {**rope, "mrope_section": [8, 4, 4], "mrope_interleaved": True},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 16,
            "out_hidden_size": 64,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    common: dict[str, Any] = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
    }
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (folder / name).write_text(json.dumps(common | kind))
    return folder
