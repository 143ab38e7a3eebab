"""Loads a causal language model from files of any supported format."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.worker.engine.checkpoints.configurations import end_token_ids
from promptq.worker.engine.checkpoints.library_errors import LOADING_ERRORS, first_sentence
from promptq.worker.engine.checkpoints.location import check_source, is_gguf
from promptq.worker.engine.checkpoints.model_folder import ModelFolder
from promptq.worker.engine.checkpoints.saved_weights import SavedWeights, shapes_of
from promptq.worker.engine.decoders.base import Decoder
from promptq.worker.engine.decoders.layer_parts import has_known_parts
from promptq.worker.engine.device.expert_weights import has_experts, take_any_sizes
from promptq.worker.engine.device.memory import counts_memory, free_bytes
from promptq.worker.engine.model.draft_heads import LoadedHead, NoHeadError, load_head
from promptq.worker.engine.quantization.fp8_weight import FP8Weight
from promptq.worker.engine.quantization.modules import SavedWeight, move_quantized, quantize_model
from promptq.worker.engine.quantization.weight import ExpertsWeight

if TYPE_CHECKING:
    from promptq.worker.engine.checkpoints.gguf.model_file import GGUFFile

    ModelFiles = ModelFolder | GGUFFile

Quantization = Literal["none", "int8", "int4"]
DType = Literal["auto", "float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST_COPIES = 2
"""The most copies of a weight that are in memory while the weight is rearranged."""


def open_files(name_or_dir: str, trust_remote_code: bool = False) -> ModelFiles:
    """Returns the files of a model in any format. Raises ModelNotFoundError if there are no files,
    UnsupportedModelError if the files cannot be read, and ConfigurationError if a package is
    missing."""
    source = check_source(name_or_dir)
    if not is_gguf(source):
        return ModelFolder(source, trust_remote_code)
    # The package for GGUF files is optional.
    from promptq.worker.engine.checkpoints.gguf.model_file import GGUFFile

    return GGUFFile(source)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for loading a model and for the code that computes it."""

    device: str = "auto"
    dtype: DType = "auto"
    trust_remote_code: bool = False
    kv_cache_memory: int | None = None
    """Bytes of the KV cache, including the states of recurrent layers. None: enough for
    `max_num_seqs` sequences, within the free memory that steps do not need."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    """The most rows of a step. On CUDA, memory for such a step is reserved."""
    max_model_len: int | None = None
    block_size: int = 16
    attention: str = "auto"
    """The name of the attention backend; `auto` selects the fastest backend that serves the model.
    Any other name rules out native code, which has its own attention."""
    native: bool = True
    """Whether to use promptq's code: native code on a CPU, fused kernels on CUDA. If false,
    transformers' modules compute the model, and torch samples. transformers' modules also compute
    the model if none of promptq's decoders supports it."""
    quantization: Quantization = "none"
    """The format to which the weights are rounded."""
    quantization_group: int = 32
    """Number of int4 weights that share a scale."""
    quantize_embeddings: bool = True
    """Whether to round the embedding and the output layer too, to int8."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """The format to which K and V are rounded; `auto`: no rounding."""
    compile: bool = False
    """Whether to compile transformers' modules (see CompiledModel)."""
    drafts: bool | None = None
    """Whether to load the model's drafting head, which predicts further tokens. None: only if
    native code computes the model."""
    cuda_graphs: bool = True
    """Whether to run steps as CUDA graphs (see GraphedModel)."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, without gradients, on its device."""

    name: str
    model: PreTrainedModel
    end_token_ids: frozenset[int]
    format: str = ""
    """Name of the files' quantization method; empty if they are not quantized."""
    head: LoadedHead | None = None
    """The drafting head; None if the files have no usable head, or if no head is wanted."""
    why_no_head: str = ""
    """The reason why the files' head was not loaded; empty if the head was loaded, or if there is
    no head."""

    @property
    def family(self) -> str:
        """transformers' name for the architecture, for example `llama`."""
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
    decoder: type[Decoder] | None = None,
    with_head: bool = False,
) -> LoadedModel:
    """Load a causal LM. A directory or a file needs no network.

    Quantized weights that `decoder` can use keep their saved format, if the model has only known
    parts. Other weights are dequantized. Raises ModelNotFoundError if there is no model. Raises
    UnsupportedModelError if the model does not load correctly. Raises ConfigurationError if an
    option is wrong or memory is short.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ConfigurationError(f"--dtype: {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    # transformers needs the package accelerate to load straight to a device.
    to_device_at_once = device.type == "cuda" and find_spec("accelerate") is not None
    files = open_files(name_or_dir, trust_remote_code)
    source, config = files.source, files.config
    _check_memory(files, dtype, device, decoder)
    placed = {"device_map": {"": device}} if to_device_at_once else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' advice is for programmers
            saved = files.quantized_weights(_computing(files, dtype, device))
            kept = _widen_others(saved, files, decoder) if saved is not None else {}
            if kept:  # load on the host: tensors without memory stand in for `kept`
                placed = {}
            if saved is not None and device.type != "cpu":
                is_widened = len(kept) < len(saved.quantized)
                require_memory(source, _bytes_of(saved, kept), device, is_widened=is_widened)
            # output_loading_info adds a second result, which transformers' type omits.
            loaded: Any
            if saved is None:
                loaded = AutoModelForCausalLM.from_pretrained(
                    source,
                    config=config,
                    dtype=_DTYPES.get(dtype, "auto"),
                    use_safetensors=True,
                    trust_remote_code=trust_remote_code,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # reported below, by name
                    **placed,
                )
            else:
                kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
                loaded = kind.from_pretrained(
                    None,
                    config=config,
                    state_dict=saved.tensors,
                    dtype=saved.dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # reported below, by name
                    **placed,
                )
            model: PreTrainedModel = loaded[0]
            info: dict[str, Any] = loaded[1]
            settings = files.generation_config or model.generation_config
    except LOADING_ERRORS as error:
        reason, damaged = first_sentence(error), ""
        if isinstance(error, SafetensorError) and isinstance(files, ModelFolder):
            damaged = files.damaged_file()
        if damaged:
            reason = f"{damaged} is damaged, fetch it again ({reason})"
        raise UnsupportedModelError(
            f"{source}: the weights of this {config.model_type!r} model do not load: {reason}"
        ) from error
    if keys := sorted(str(key) for key in info["missing_keys"]):
        raise UnsupportedModelError(
            f"{source}: {len(keys)} weights that {type(model).__name__} needs are missing, for"
            f" example {keys[0]}"
        )
    if mismatched := sorted(info["mismatched_keys"]):
        name, saved_shape, shape = mismatched[0]
        raise UnsupportedModelError(
            f"{source}: {len(mismatched)} weights have other sizes than config.json says, for"
            f" example {name}: {[*saved_shape]} in the files, {[*shape]} by config.json"
        )
    if saved is not None and (keys := sorted(str(key) for key in info["unexpected_keys"])):
        raise UnsupportedModelError(
            f"{source}: it has {len(keys)} tensors that {type(model).__name__} does not know, for"
            f" example {keys[0]}"
        )
    module: torch.nn.Module = model  # transformers' class has untyped methods instead
    module.requires_grad_(False).eval()
    take_any_sizes(model)
    if kept:
        quantize_model(model, saved=kept)
        move_quantized(model, device)
    module.to(device)
    # The generation settings' end tokens come before the configuration's.
    ends = end_token_ids((settings, model.config, model.config.get_text_config()))
    head, why_no_head = _head(files, model) if with_head else (None, "")
    return LoadedModel(
        name_or_dir, model, ends, "" if saved is None else saved.format, head, why_no_head
    )


def _head(files: ModelFiles, model: PreTrainedModel) -> tuple[LoadedHead | None, str]:
    """Returns the drafting head of the files, or None and the reason why it cannot be used. The
    reason is empty if the files have no head."""
    if not isinstance(files, ModelFolder):
        return None, ""
    try:
        if not (places := files.head_files()):
            return None, ""
        if files.is_quantized:
            return None, "its weights are quantized"
        return load_head(model, files.head_weights(places)), ""
    except (NoHeadError, StopIteration, *LOADING_ERRORS) as error:
        return None, first_sentence(error)


def _widen_others(
    saved: SavedWeights, files: ModelFiles, decoder: type[Decoder] | None
) -> dict[str, SavedWeight]:
    """Dequantize the weights that `decoder` cannot use, and return the others. Returns an empty
    dict if transformers renames or joins weights of this family."""
    kept = {}
    if saved.quantized and decoder is not None and decoder.is_available():
        makes: Any = AutoModelForCausalLM
        with torch.device("meta"):
            model = makes.from_config(files.config)
        embedding = model.get_input_embeddings()
        plain = {
            name
            for name, each in model.named_modules()
            if type(each) is nn.Linear or each is embedding or has_experts(each)
        }
        if has_known_parts(model) and saved.quantized.keys() <= plain:
            is_exact = saved.dtype == torch.float32  # slow with weights in fp8
            kept = {
                name: weight
                for name, weight in saved.quantized.items()
                if _takes(decoder, weight) and not (is_exact and isinstance(weight, FP8Weight))
            }
    wide = saved.quantized.keys() - kept.keys()
    numbers = sum(
        prod(shape) for name in wide for shape in shapes_of(name, saved.quantized[name]).values()
    )
    require_memory(
        files.source, numbers * saved.dtype.itemsize, torch.device("cpu"), is_widened=True
    )
    for name in wide:
        saved.widen(name)
    return kept


def _takes(decoder: type[Decoder], weight: SavedWeight) -> bool:
    if isinstance(weight, ExpertsWeight):
        return all(map(decoder.takes, weight.parts))
    return decoder.takes(weight)


def _bytes_of(saved: SavedWeights, kept: Mapping[str, SavedWeight]) -> int:
    """Returns the bytes of the weights. Weights in `kept` count in their saved format."""
    names = {name for module, weight in kept.items() for name in shapes_of(module, weight)}
    tensors = [tensor for name, tensor in saved.tensors.items() if name not in names]
    tensors += [each for weight in kept.values() for each in weight.tensors]
    return sum(tensor.nbytes for tensor in tensors)


def fits_beside_others(
    dir_or_file: str,
    device: torch.device,
    dtype: DType,
    kv_cache_memory: int | None,
    *,
    trust_remote_code: bool = False,
) -> bool:
    """Whether enough memory is surely free for one more model and for `kv_cache_memory` bytes. If
    `kv_cache_memory` is None, returns False for CUDA, where each model then takes most of the
    memory."""
    if kv_cache_memory is None and counts_memory(device):
        return False  # without a limit, each model takes most of the free memory
    files = open_files(dir_or_file, trust_remote_code)
    needed = _MOST_COPIES * files.num_bytes(_DTYPES.get(dtype))
    return needed + (kv_cache_memory or 0) <= free_bytes(device)


def _check_memory(
    files: ModelFiles, dtype: DType, device: torch.device, decoder: type[Decoder] | None
) -> None:
    # Quantized weights are read on the host first.
    places = {device, torch.device("cpu")} if files.is_quantized else {device}
    device = min(places, key=free_bytes)
    if files.is_quantized and decoder is not None:
        # The true size is checked after reading.
        require_memory(files.source, files.num_saved_bytes, device)
        return
    needed = files.num_bytes(_DTYPES.get(dtype))
    require_memory(files.source, needed, device, is_widened=files.is_quantized)


def require_memory(
    source: str, needed: int, device: torch.device, *, is_widened: bool = False
) -> None:
    """Raise ConfigurationError if fewer than `needed` bytes are free for the weights of `source`.
    With `is_widened`, the message says that weights are dequantized while they are loaded."""
    if needed <= (free := free_bytes(device)):
        return
    widened = ", which are widened while they are loaded," if is_widened else ""
    raise ConfigurationError(
        f"--model: the weights of {source}{widened} take {needed / 2**30:,.1f} GiB, and"
        f" {free / 2**30:,.1f} GiB are free on {device}; use a smaller model or dtype, or another"
        " device"
    )


def _computing(files: ModelFiles, dtype: DType, device: torch.device) -> torch.dtype:
    """Returns the dtype in which a quantized model computes. On a CPU, bf16 replaces fp16."""
    if dtype == "auto" and files.dtype == torch.float16 and device.type == "cpu":
        return torch.bfloat16
    return _DTYPES.get(dtype, files.dtype)
