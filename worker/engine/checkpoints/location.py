"""Locations of a model's files: a directory, a GGUF file, or a name on a model hub."""

from __future__ import annotations

from pathlib import Path

from promptq.shared.errors import ModelNotFoundError
from promptq.shared.runtime.extras import require
from promptq.worker.engine.checkpoints.safe_files import (
    check_config,
    check_files,
    read_config,
    shards_of,
)

_GGUF = ".gguf"


def is_gguf(name_or_dir: str) -> bool:
    return name_or_dir.lower().endswith(_GGUF) and not Path(name_or_dir).expanduser().is_dir()


def library_arguments(name_or_dir: str) -> tuple[str, dict[str, str]]:
    """Returns the name and the keyword arguments with which transformers' `from_pretrained` loads
    the tokenizer."""
    if not is_gguf(name_or_dir):
        return name_or_dir, {}
    file = Path(name_or_dir).expanduser()
    # A name without its folder could be read as a file in the current folder.
    return str(file.parent), {"gguf_file": str(file.absolute())}


def check_source(name_or_dir: str) -> str:
    """Returns the path of a model's directory or GGUF file, or a hub name unchanged. Raises
    ModelNotFoundError if there is no model. Raises UnsupportedModelError if promptq refuses a file
    of the directory. Raises ConfigurationError if the package that reads GGUF files is missing."""
    place = Path(name_or_dir).expanduser()
    if place.is_dir():
        _check_directory(place, name_or_dir)
        return str(place)
    if is_gguf(name_or_dir):
        if not place.is_file():
            raise ModelNotFoundError(f"{name_or_dir}: there is no such file")
        require("a GGUF file", "gguf")
        return str(place)
    if place.exists():
        raise ModelNotFoundError(
            f"{name_or_dir}: is neither a model directory nor a file that ends with {_GGUF}"
        )
    if name_or_dir.startswith(("/", ".", "~")) or name_or_dir.count("/") != 1:
        raise ModelNotFoundError(
            f"{name_or_dir}: there is no such directory, and a hub name is like owner/name"
        )
    return name_or_dir


def _check_directory(directory: Path, name: str) -> None:
    files = sorted(file for file in directory.iterdir() if file.suffix.lower() == _GGUF)
    if files and not any(directory.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"{name}: has no *.safetensors weights; to serve its GGUF file, name that:"
            f" --model {files[0]}"
        )
    check_files(directory)
    if not (directory / "config.json").is_file():
        raise ModelNotFoundError(f"{name}: has no config.json, so it is no model directory")
    check_config(name, read_config(directory / "config.json", name))


def check_weights(source: str) -> None:
    """Check that a directory has weights. For a hub name, checks nothing, because transformers does
    that. Raises ModelNotFoundError if a file with weights is missing. Raises UnsupportedModelError
    if the index names a file that is not a safetensors file of the directory."""
    folder = Path(source)
    if not folder.is_dir():
        return
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"{source}: has no *.safetensors weights, and no other format of a directory is"
            " supported"
        )
    for name in shards_of(folder, source) or ():
        if not (folder / name).is_file():
            raise ModelNotFoundError(
                f"{source}: {name}, which the index names, is missing; fetch the model again"
            )
