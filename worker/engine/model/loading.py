"""Loads a causal language model from a directory or by its hub name."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from promptq.shared.errors import ConfigurationError, ModelNotFoundError, UnsupportedModelError
from promptq.worker.engine.api.end_tokens import end_token_ids
from promptq.worker.engine.device.memory import counts_memory, free_bytes

Quantization = Literal["none", "int8", "int4"]
DType = Literal["auto", "float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST_COPIES = 2
"""While weights are arranged for code of our own, they are there twice."""
_LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    SafetensorError,
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model, and what to compute it with."""

    device: str = "auto"
    dtype: DType = "auto"
    trust_remote_code: bool = False
    kv_cache_memory: int | None = None
    """Bytes; None: as many as `max_num_seqs` sequences need, within what is free and what no step
    needs."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    """The most rows of a step, for which memory is kept on CUDA."""
    max_model_len: int | None = None
    block_size: int = 16
    attention: str = "auto"
    """The name of the attention backend; `auto` is the fastest one that serves the model. Native
    code has its own, so a name rules it out."""
    native: bool = True
    """Whether to use code of our own: native code on a CPU, fused kernels on CUDA. Without it,
    torch samples and the library's modules compute. They also compute if no decoder of our own fits
    the model."""
    quantization: Quantization = "none"
    """What to round the weights to."""
    quantization_group: int = 32
    """How many weights in int4 share a scale."""
    quantize_embeddings: bool = True
    """Whether to round the embedding and the output layer too, to int8."""
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """What K and V are rounded to; `auto`: they are not."""
    compile: bool = False
    """Whether to compile the library's modules (see CompiledModel)."""
    cuda_graphs: bool = True
    """Whether to run steps as CUDA graphs (see GraphedModel)."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, without gradients, on its device."""

    name: str
    model: PreTrainedModel
    end_token_ids: frozenset[int]

    @property
    def family(self) -> str:
        """The library's name for the architecture, `llama` for example."""
        return str(self.model.config.model_type)

    @property
    def text_config(self) -> PreTrainedConfig:
        """The part of the configuration that describes the language model."""
        return self.model.config.get_text_config(decoder=True)


def load_model(
    name_or_dir: str,
    *,
    device: torch.device,
    dtype: DType = "auto",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a causal LM from its safetensors weights; a directory needs no network.

    Raises ModelNotFoundError if there is no model at that place, and UnsupportedModelError if the
    model does not load correctly.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ConfigurationError(f"--dtype: {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    # The library needs the package accelerate to load straight to a device.
    to_device_at_once = device.type == "cuda" and find_spec("accelerate") is not None
    source = check_source(name_or_dir)
    config = _load_config(source, trust_remote_code)
    check_weights(source)
    _check_memory(source, config, dtype, device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's advice is for programmers
            # With output_loading_info there are two results, which the library's type omits.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=_DTYPES.get(dtype, "auto"),
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **({"device_map": {"": device}} if to_device_at_once else {}),
            )
            model: PreTrainedModel = loaded[0]
            info: dict[str, Any] = loaded[1]
    except _LOADING_ERRORS as error:
        raise UnsupportedModelError(
            f"{source}: the weights of this {config.model_type!r} model do not load: "
            f"{_first_sentence(error)}"
        ) from error
    for problem in ("missing", "mismatched"):
        if keys := sorted(str(key) for key in info[f"{problem}_keys"]):
            raise UnsupportedModelError(
                f"{source}: {len(keys)} weights that {type(model).__name__} needs are "
                f"{problem}, for example {keys[0]}"
            )
    module: torch.nn.Module = model  # the library's class has untyped methods instead
    module.requires_grad_(False).eval().to(device)
    # The generation settings' end tokens come before the configuration's.
    configurations = (model.generation_config, model.config, model.config.get_text_config())
    return LoadedModel(name_or_dir, model, end_token_ids(configurations))


def check_source(name_or_dir: str) -> str:
    """The directory, checked to hold a model, or the hub name as it is.

    Raises ModelNotFoundError.
    """
    directory = Path(name_or_dir).expanduser()
    if not directory.is_dir():
        if directory.exists():
            raise ModelNotFoundError(f"{name_or_dir}: is a file, not a model directory")
        is_path = name_or_dir.startswith(("/", ".", "~")) or name_or_dir.count("/") != 1
        if is_path:
            raise ModelNotFoundError(
                f"{name_or_dir}: there is no such directory, and a hub name is like owner/name"
            )
        return name_or_dir
    if not (directory / "config.json").is_file():
        raise ModelNotFoundError(f"{name_or_dir}: has no config.json, so it is no model directory")
    try:
        config = json.loads((directory / "config.json").read_text())
    except ValueError as error:
        raise ModelNotFoundError(f"{name_or_dir}: config.json is not JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelNotFoundError(f"{name_or_dir}: config.json has no model_type")
    return str(directory)


def check_weights(source: str) -> None:
    """Refuse a directory without weights. For a hub name, the library reports that itself.

    Raises ModelNotFoundError.
    """
    if Path(source).is_dir() and not any(Path(source).glob("*.safetensors")):
        raise ModelNotFoundError(
            f"{source}: has no *.safetensors weights, and no other format is supported"
        )


def fits_beside_others(
    folder: str, device: torch.device, dtype: DType, kv_cache_memory: int | None
) -> bool:
    """Whether a model can surely be loaded while others stay in memory."""
    if kv_cache_memory is None and counts_memory(device):
        return False  # each takes most of what is free
    config = PreTrainedConfig.from_json_file(f"{folder}/config.json")
    needed = _MOST_COPIES * _bytes_of_weights(folder, config, dtype)
    return needed + (kv_cache_memory or 0) <= free_bytes(device)


def _check_memory(
    source: str, config: PreTrainedConfig, dtype: DType, device: torch.device
) -> None:
    """Refuse a directory's weights if they do not fit, or the system would end the process."""
    if not Path(source).is_dir():
        return
    needed, free = _bytes_of_weights(source, config, dtype), free_bytes(device)
    if needed > free:
        raise ConfigurationError(
            f"--model: the weights of {source} take {needed / 2**30:,.1f} GiB, and"
            f" {free / 2**30:,.1f} GiB are free on {device}; use a smaller model or dtype, or"
            " another device"
        )


def _bytes_of_weights(folder: str, config: PreTrainedConfig, dtype: DType) -> int:
    """How much memory they take in `dtype`."""
    saved_bytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    saved, wanted = getattr(config, "dtype", None), _DTYPES.get(dtype)
    if isinstance(saved, torch.dtype) and wanted is not None:
        return saved_bytes * wanted.itemsize // saved.itemsize
    return saved_bytes


def _load_config(source: str, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code
        )
    except _LOADING_ERRORS as error:
        if "model type" in str(error) and "does not recognize" in str(error):
            raise UnsupportedModelError(
                f"{source}: the installed transformers does not know this family: "
                f"{_first_sentence(error)}"
            ) from error
        raise ModelNotFoundError(f"{source}: {_first_sentence(error)}") from error
    remote_classes: dict[str, str] = getattr(config, "auto_map", None) or {}
    is_remote = trust_remote_code and "AutoModelForCausalLM" in remote_classes
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not is_remote:
        raise ModelNotFoundError(
            f"{source}: is not a causal language model (its family is {config.model_type!r})"
        )
    return config


def _first_sentence(error: Exception) -> str:
    """The first sentence of the library's message. The others give advice."""
    text = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".")
