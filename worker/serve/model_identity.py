"""The identity of a worker's model: the name that clients use, and a fingerprint of the files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from promptq.shared.protocol.claims import ModelIdentity
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.checkpoints.location import (
    check_source,
    check_weights,
    is_gguf,
    library_arguments,
)
from promptq.worker.shipped import MODEL_DIR, MODEL_NAME
from promptq.worker.text.output_styles import style_of
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from promptq.worker.upstream.dialects.adapter import adapter_of

MODEL_FREE = "model-free"
"""The value of `--model` for the engine that has no model."""
NATIVE = "native"
"""The value of `--engine` for promptq's engine."""
_HASHED_BYTES = 2**20


def identify(settings: WorkerSettings) -> ModelIdentity:
    """Returns the identity of the settings' model. Loads no weights. Raises ModelError."""
    if settings.model == MODEL_FREE and settings.engine == NATIVE:
        return ModelIdentity(MODEL_FREE, MODEL_FREE)
    adapter = adapter_of(settings)
    name = adapter.base if adapter else settings.model or str(MODEL_DIR)
    if settings.engine == NATIVE:
        check_weights(check_source(name))
    tokenizer = HuggingFaceTokenizer.load(name, trust_remote_code=settings.trust_remote_code)
    return identity_of(settings, tokenizer)


def identity_of(settings: WorkerSettings, tokenizer: HuggingFaceTokenizer) -> ModelIdentity:
    """Returns the identity of the model that the settings name. promptq's engine or an inference
    server may serve the model. Raises ModelError, ConfigurationError."""
    is_native = settings.engine == NATIVE
    name = settings.model or str(MODEL_DIR)
    adapter = adapter_of(settings)
    fingerprint = _fingerprint(
        adapter.base if adapter else name,
        adapter.files if adapter else [],
        with_weights=is_native,
    )
    if is_native:
        fingerprint += "".join(f"-{part}" for part in _formats(settings))
    return ModelIdentity(
        shown_name(settings),
        fingerprint if is_native else f"{settings.engine}-{fingerprint}",
        style_of(tokenizer, settings.output_style),
    )


def _formats(settings: WorkerSettings) -> list[str]:
    # These formats change outputs more than another processor would.
    formats: list[str] = []
    if settings.quantization != "none":
        formats.append(settings.quantization)
        if settings.quantization == "int4" and settings.quantization_group != "32":
            formats.append(settings.quantization_group)
        if not settings.quantize_embeddings:
            formats.append("layers")
    if settings.kv_cache_dtype != "auto":
        formats.append(f"kv-{settings.kv_cache_dtype}")
    return formats


def shown_name(settings: WorkerSettings) -> str:
    """Returns the name by which clients know the model."""
    if settings.served_model_name is not None:
        return settings.served_model_name
    if settings.model is None:
        return MODEL_NAME
    path = Path(settings.model)
    if is_gguf(settings.model):
        return path.stem
    return path.resolve().name if path.is_dir() else settings.model


def _fingerprint(name_or_dir: str, others: Sequence[Path], *, with_weights: bool) -> str:
    """Returns a hash of the names, sizes and first MiB of each file of a model and of `others`.

    The first MiB has the names and shapes of the tensors (safetensors), or the name and vocabulary
    (GGUF). `with_weights` is False for an inference server's worker, which may lack the weights.
    """
    folder = folder_of(name_or_dir)
    digest = hashlib.sha256()
    names = ("config.json", "tokenizer.json", "tokenizer.model")
    files = [folder / name for name in names if (folder / name).exists()]
    if with_weights:
        files += sorted(folder.glob("*.safetensors"))
    if is_gguf(name_or_dir):  # a single file contains all of these
        files = [Path(name_or_dir).expanduser()]
    for file in (*files, *others):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(_HASHED_BYTES))
    return digest.hexdigest()[:16]


def folder_of(name_or_dir: str) -> Path:
    """Returns the folder of a model's files, without a download. `name_or_dir` is a folder, a GGUF
    file, or the hub name of a model that was downloaded earlier."""
    folder = Path(library_arguments(name_or_dir)[0])
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name_or_dir, local_files_only=True))
