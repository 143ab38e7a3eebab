"""Reads facts about a model from its files, for a worker with an inference server."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promptq.shared.errors import ConfigurationError, ModelNotFoundError
from promptq.shared.runtime.extras import require
from promptq.worker.engine.checkpoints.configurations import end_token_ids
from promptq.worker.engine.checkpoints.location import check_source, is_gguf


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from a model's configuration, without the weights."""

    vocab_size: int
    end_token_ids: frozenset[int]


def read_model_facts(name_or_dir: str, *, trust_remote_code: bool = False) -> ModelFacts:
    """Returns a model's facts. Raises ModelNotFoundError if there is no configuration, and
    ConfigurationError if a package that reads the configuration is missing."""
    if is_gguf(name_or_dir):
        source = check_source(name_or_dir)
        from promptq.worker.engine.checkpoints.gguf.header import GGUFHeader

        header = GGUFHeader(source)
        return ModelFacts(header.vocab_size, header.end_token_ids)
    from transformers import AutoConfig, GenerationConfig

    from promptq.worker.engine.checkpoints.library_errors import LOADING_ERRORS, first_sentence

    if Path(name_or_dir).is_dir():
        name_or_dir = check_source(name_or_dir)
    try:
        config: Any = AutoConfig.from_pretrained(name_or_dir, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        places: list[Any] = [config, text]
        with suppress(OSError):  # a model need not have one
            places.insert(0, GenerationConfig.from_pretrained(name_or_dir))
        return ModelFacts(text.vocab_size, end_token_ids(places))
    except LOADING_ERRORS as error:
        raise ModelNotFoundError(
            f"{name_or_dir} has no usable configuration: {first_sentence(error)}"
        ) from error


def require_for_gguf() -> None:
    """Raise ConfigurationError if a package that reads a GGUF file's tokenizer is missing.

    transformers needs torch to read such a tokenizer.
    """
    try:
        require("the tokenizer of a GGUF file", "gguf", "worker")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error}; or name the directory of the model's tokenizer as --model, and the file"
            " behind `--`, as in `-- --model model.gguf`"
        ) from None
