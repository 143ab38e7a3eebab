"""Tiny models, one for each kind of layer, that replace the shipped model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from promptq.worker.shipped import MODEL_DIR

FAMILIES = {
    "attention": "qwen3",
    "windows": "gemma3_text",
    "experts": "qwen3_moe",
    "latent": "deepseek_v3",
    "delta-net": "qwen3_5_text",
    "mamba": "granitemoehybrid",
    "convolution": "lfm2",
}


def save_model_of(kind: str, folder: Path) -> Path:
    """Returns a directory with random weights and the tokenizer of the shipped model."""
    from tests.worker.engine.tiny_models import save_model  # with torch and transformers

    directory = folder / f"model-{kind}"
    vocab_size = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 2048}
    save_model(directory, FAMILIES[kind], seed=1, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL_DIR / name, directory)
    return directory
