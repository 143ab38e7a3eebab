"""Reads a model from a directory of safetensors files, or from a model hub."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from promptq.shared.errors import ModelNotFoundError, UnsupportedModelError
from promptq.worker.engine.checkpoints.awq import AWQ
from promptq.worker.engine.checkpoints.compressed_tensors import CompressedTensors
from promptq.worker.engine.checkpoints.fp8 import FP8
from promptq.worker.engine.checkpoints.gptq import GPTQ
from promptq.worker.engine.checkpoints.library_errors import LOADING_ERRORS, first_sentence
from promptq.worker.engine.checkpoints.location import check_weights
from promptq.worker.engine.checkpoints.safe_files import (
    HEAD_FOLDER,
    check_config,
    check_experts,
    check_sizes,
    shards_of,
)
from promptq.worker.engine.checkpoints.saved_weights import SavedWeights
from promptq.worker.engine.quantization.modules import FewBits

_PART_OF_HEAD = re.compile(r"(^|\.)(mtp|eh_proj|enorm|hnorm|shared_head)\.")


class Format(Protocol):
    """Reads the layers of one quantization method. The constructor takes the `quantization_config`,
    and raises UnsupportedModelError for a variant that promptq does not support."""

    marker: str
    """The name of the tensor that only quantized layers have."""
    bits: int
    """Bits of one element of a weight. A 32-bit word in a file has several elements."""

    def weight(self, parts: Mapping[str, torch.Tensor]) -> FewBits | torch.Tensor:
        """Returns a linear layer's weight from its tensors. Raises KeyError if a tensor is
        missing."""


_FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": GPTQ,
    "awq": AWQ,
    "fp8": FP8,
}
_OF_THE_CACHE = {"q_scale", "k_scale", "v_scale"}
"""Names of scales for a quantized KV cache. promptq ignores them, and computes other scales."""
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_HEADER = 100_000_000
"""The most bytes of a safetensors file's header. The safetensors library has the same limit."""


class ModelFolder:
    """A model in a directory or on a hub. Another tool may have quantized the model's weights."""

    def __init__(self, source: str, trust_remote_code: bool) -> None:
        """Read the configuration. Raises ModelNotFoundError if there is no causal language model,
        and UnsupportedModelError if promptq does not support the model."""
        self.source = source
        self.config = _load_config(source, trust_remote_code)
        check_weights(source)
        _check_index_of_hub(source)
        # transformers would look for the tool that quantized the weights.
        settings = self.config.__dict__.pop("quantization_config", None)
        if settings and not isinstance(settings, dict):
            settings = settings.to_dict()
        self._method = str(settings.get("quant_method")) if settings else ""
        self._format = _format(source, self._method, settings) if settings else None
        text_config = self.config.get_text_config(decoder=True)
        if not isinstance(text_config, PreTrainedConfig):
            raise UnsupportedModelError(
                f"{source}: config.json has a text_config that the model's type does not have"
            )
        check_experts(source, text_config, has_weights=self._has_experts)
        if Path(source).is_dir() and (numbers := self._num_numbers):
            check_sizes(source, text_config, numbers)

    def _has_experts(self) -> bool:
        files = self._files() if Path(self.source).is_dir() else []
        return any(".experts." in name for file in files for name in _tensors(file))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model was saved, or the dtype before it was quantized."""
        saved = getattr(self.config, "dtype", None)
        return saved if isinstance(saved, torch.dtype) else torch.float32

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The folder's generation config, if the weights are quantized. None if the folder has no
        such config, or if the weights are not quantized, because then transformers reads the
        config."""
        if self._format is None or not (self._folder() / "generation_config.json").exists():
            return None
        config: GenerationConfig = GenerationConfig.from_pretrained(self.source)
        return config

    @property
    def is_quantized(self) -> bool:
        return self._format is not None

    @property
    def num_saved_bytes(self) -> int:
        """Bytes of all weight files; 0 for a hub name, because the files may not be downloaded
        yet."""
        if not Path(self.source).is_dir():
            return 0
        return sum(file.stat().st_size for file in self._files())

    def num_bytes(self, dtype: torch.dtype | None) -> int:
        """Returns the bytes of all parameters in `dtype` (None: the dtype that transformers loads).
        Returns 0 for a hub name, because the files may not be downloaded yet."""
        if not Path(self.source).is_dir():
            return 0
        if self._format is None and dtype is None:
            return self.num_saved_bytes
        return self._num_numbers * (dtype or self.dtype).itemsize

    @cached_property
    def _num_numbers(self) -> int:
        """Number of elements of all weights; 0 if the files are damaged."""
        packed = 1 if self._format is None else 32 // self._format.bits
        return sum(_num_numbers(file, packed) for file in self._files())

    def quantized_weights(self, dtype: torch.dtype) -> SavedWeights | None:
        """Returns the weights for a model that computes in `dtype`; None if no weight is quantized.
        Raises UnsupportedModelError if a tensor is missing, SafetensorError for a damaged file."""
        if self._format is None:
            return None
        saved = SavedWeights(self._method, dtype)
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(file, "pt")) for file in self._files()]
            places = {name: file for file in files for name in file.keys()}  # noqa: SIM118 # no dict
            for name in self._of_head(places):
                del places[name]  # no code reads a quantized head
            marked = {_module(name) for name in places if _part(name) == self._format.marker}
            layers: dict[str, dict[str, Any]] = defaultdict(dict)
            for name, file in places.items():
                if _module(name) in marked and _part(name) != "bias":
                    layers[_module(name)][_part(name)] = file
                elif _part(name) not in _OF_THE_CACHE:
                    tensor = file.get_tensor(name)
                    if _part(name) == "weight" and tensor.dtype not in _PLAIN:
                        raise UnsupportedModelError(
                            f"{self.source}: {name} is in {tensor.dtype}, and there is no"
                            f" {_module(name)}.{self._format.marker}"
                        )
                    saved.add_tensor(name, tensor)
            for module, parts in layers.items():
                tensors = {key: file.get_tensor(f"{module}.{key}") for key, file in parts.items()}
                saved.add(module, self._weight(self._format, module, tensors))
        return saved

    def damaged_file(self) -> str:
        """Returns the name of the first damaged file with weights; empty if no file is damaged."""
        for file in self._files_in(self._folder(is_loaded=True)):
            try:
                with safe_open(file, "pt"):
                    pass
            except (SafetensorError, OSError):
                return file.name
        return ""

    def head_files(self) -> dict[str, Path]:
        """Returns the files of the head that predicts further tokens, by the names of its tensors.
        The result is empty if the model has no head.

        The head may be in the folder `mtp`, which programs without support for heads do not read.
        """
        folder = self._folder(is_loaded=True)
        places: dict[str, Path] = {}
        further = (folder / HEAD_FOLDER).glob("*.safetensors")
        for file in (*self._files_in(folder), *sorted(further)):
            with safe_open(file, "pt") as tensors:
                places |= dict.fromkeys(tensors.keys(), file)
        shared = (".embed_tokens.weight", ".shared_head.head.weight")  # copies of the model's
        return {name: places[name] for name in self._of_head(places) if not name.endswith(shared)}

    @staticmethod
    def head_weights(places: Mapping[str, Path]) -> dict[str, torch.Tensor]:
        """Returns the head's tensors by name. `places` is the result of `head_files`."""
        weights: dict[str, torch.Tensor] = {}
        for file in {*places.values()}:
            with safe_open(file, "pt") as tensors:
                of_file = [name for name in places if places[name] == file]
                weights |= {name: tensors.get_tensor(name) for name in of_file}
        return weights

    def _of_head(self, names: Iterable[str]) -> list[str]:
        """Returns the `names` of the head's tensors. They are in the module `mtp` (Qwen3-Next), or
        in a layer after the model's last layer (DeepSeek-V3, GLM-4.5). This layer counts as a head
        only if it has a part that no other layer has."""
        first = self.config.get_text_config(decoder=True).num_hidden_layers
        of_head = re.compile(rf"(model\.)?(language_model\.)?(layers\.{first}|mtp)\..+")
        found = [name for name in names if of_head.fullmatch(name)]
        return found if any(map(_PART_OF_HEAD.search, found)) else []

    def _weight(
        self, format: Format, module: str, parts: dict[str, torch.Tensor]
    ) -> FewBits | torch.Tensor:
        layer = f"{self.source}: the {self._method} layer {module}"
        try:
            return format.weight(parts)
        except KeyError as error:
            raise UnsupportedModelError(
                f"{layer} has no {error.args[0]}, only {', '.join(sorted(parts))}"
            ) from error
        except (RuntimeError, ValueError) as error:  # sizes that do not belong together
            raise UnsupportedModelError(f"{layer} has parts of wrong sizes: {error}") from error

    def _files(self) -> list[Path]:
        """Returns the safetensors files with weights, except copies that the index leaves out."""
        return self._files_in(self._folder())

    def _files_in(self, folder: Path) -> list[Path]:
        names = shards_of(folder, self.source)
        if names is None:
            return sorted(folder.glob("*.safetensors"))
        return [folder / name for name in names]

    def _folder(self, *, is_loaded: bool = False) -> Path:
        """Returns the folder of the files. Downloads the files from a hub, unless `is_loaded` says
        that transformers has already downloaded all files that it needs."""
        here = Path(self.source)
        if here.is_dir():
            return here
        patterns = ["*.safetensors", "*.json"]
        return Path(
            snapshot_download(self.source, allow_patterns=patterns, local_files_only=is_loaded)
        )


def _check_index_of_hub(name: str) -> None:
    """Raise UnsupportedModelError if a hub's index names other formats. Downloads no weights."""
    if Path(name).is_dir():
        return
    with suppress(OSError):  # no index, or transformers reports the error
        shards_of(Path(hf_hub_download(name, "model.safetensors.index.json")).parent, name)


def _format(source: str, method: str, settings: Mapping[str, Any]) -> Format:
    if method not in _FORMATS:
        raise UnsupportedModelError(
            f"{source}: its weights are quantized by the method {method!r}, but promptq reads only"
            f" {', '.join(_FORMATS)}"
        )
    try:
        return _FORMATS[method](settings)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source}: {error}") from error
    except LOADING_ERRORS as error:
        raise UnsupportedModelError(
            f"{source}: its quantization_config is not one of {method}: {first_sentence(error)}"
        ) from error


def _load_config(source: str, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        if not Path(source).is_dir():
            check_config(source, PreTrainedConfig.get_config_dict(source)[0])
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code
        )
    except LOADING_ERRORS as error:
        if "model type" in str(error) and "does not recognize" in str(error):
            raise UnsupportedModelError(
                f"{source}: the installed transformers does not know this family: "
                f"{first_sentence(error)}"
            ) from error
        raise ModelNotFoundError(f"{source}: {first_sentence(error)}") from error
    remote_classes: dict[str, str] = getattr(config, "auto_map", None) or {}
    is_remote = trust_remote_code and "AutoModelForCausalLM" in remote_classes
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not is_remote:
        raise ModelNotFoundError(
            f"{source}: is not a causal language model (its family is {config.model_type!r})"
        )
    return config


def _num_numbers(file: Path, packed: int) -> int:
    """Returns the number of elements in a safetensors file. A 32-bit word counts as `packed`
    elements. Returns 0 for a damaged file: the error appears when the file is loaded."""
    try:
        return sum(
            prod(tensor["shape"]) * (packed if tensor["dtype"] == "I32" else 1)
            for tensor in _tensors(file).values()
        )
    except (KeyError, TypeError):
        return 0


def _tensors(file: Path) -> dict[str, Any]:
    """Returns a safetensors file's header, tensor by tensor; empty if the file is damaged."""
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(min(size, _LARGEST_HEADER)))
        header.pop("__metadata__", None)
        return dict(header)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _part(name: str) -> str:
    return name.rpartition(".")[2]
