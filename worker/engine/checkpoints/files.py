"""The files of a model, whatever their form."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import GenerationConfig, PreTrainedConfig

from promptq.worker.engine.checkpoints.location import check_source, is_gguf
from promptq.worker.engine.checkpoints.model_folder import ModelFolder
from promptq.worker.engine.checkpoints.saved_weights import SavedWeights


class ModelFiles(Protocol):
    """Configuration and weights of a model."""

    source: str
    config: PreTrainedConfig

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def generation_config(self) -> GenerationConfig | None: ...

    @property
    def is_quantized(self) -> bool: ...

    @property
    def num_saved_bytes(self) -> int: ...

    def num_bytes(self, dtype: torch.dtype | None) -> int: ...

    def quantized_weights(self, dtype: torch.dtype) -> SavedWeights | None: ...


def open_files(name_or_dir: str, trust_remote_code: bool = False) -> ModelFiles:
    """Raises ModelNotFoundError if there is no model at that place, UnsupportedModelError if it is
    not read, and ConfigurationError if a package is missing."""
    source = check_source(name_or_dir)
    if not is_gguf(source):
        return ModelFolder(source, trust_remote_code)
    # Its package is optional.
    from promptq.worker.engine.checkpoints.gguf.model_file import GGUFFile

    return GGUFFile(source)
