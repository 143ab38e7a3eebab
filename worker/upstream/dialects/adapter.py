"""A LoRA adapter, which an inference server applies to its base model.

Each adapter has a queue. `--model` names the folder with the adapter's files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promptq.shared.errors import ConfigurationError, ModelNotFoundError
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.checkpoints.safe_files import check_files

ENGINES = ("vllm", "llama.cpp", "openai")
_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's folder in the format of the library PEFT."""

    name: str
    """The adapter's name, at the server and for clients."""
    folder: Path
    base: str
    """Directory or hub name of the base model."""

    @property
    def files(self) -> list[Path]:
        """The files that make up the adapter."""
        return [self.folder / _CONFIG, *sorted(self.folder.glob("*.safetensors"))]

    def check_card(self, card: Mapping[str, Any], where: str) -> None:
        """Raise ConfigurationError if `card`, a server's description of the model with this name,
        describes no adapter, or an adapter in another folder. `where` names the server."""
        place = str(card.get("root"))
        is_other = os.path.isdir(place) and not os.path.samefile(place, self.folder)
        if is_other or not card.get("parent"):
            raise ConfigurationError(
                f"--model: {where} has another model {self.name!r}, from {place:.200}; choose"
                " another name with --served-model-name"
            )


def adapter_of(settings: WorkerSettings) -> Adapter | None:
    """Returns the adapter that `--model` names; None if `--model` names no adapter. Raises
    ConfigurationError, and ModelError for a folder that cannot be used."""
    folder = Path(settings.model or "").expanduser().absolute()
    if settings.model is None or not (folder / _CONFIG).is_file():
        return None
    if any(folder.glob("model*.safetensors")):  # a merge has left the adapter's file
        return None
    if settings.engine not in ENGINES:
        raise ConfigurationError(
            f"--model: {folder} is a LoRA adapter, and only --engine {', '.join(ENGINES)} serve"
            " adapters"
        )
    if settings.trust_remote_code:  # a stranger's file would choose the code
        raise ConfigurationError(
            f"--trust-remote-code: {folder} is a LoRA adapter, whose files name the base model;"
            " merge the adapter with its base model"
        )
    check_files(folder)
    try:
        base = json.loads((folder / _CONFIG).read_bytes())["base_model_name_or_path"]
    except (RecursionError, ValueError, KeyError, TypeError) as error:
        raise ModelNotFoundError(f"{folder}: {_CONFIG} names no base model: {error!r}") from error
    if not isinstance(base, str) or not base or base.startswith("-"):  # an option of vLLM's
        raise ModelNotFoundError(f"{folder}: {_CONFIG} names no base model")
    return Adapter(settings.served_model_name or folder.resolve().name, folder, base)
