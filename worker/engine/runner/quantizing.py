"""Quantizes weights and KV cache for promptq's decoders; dequantizes weights for other code."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.worker.engine.device.memory import give_back
from promptq.worker.engine.load_check.checked_model import CheckedModel
from promptq.worker.engine.load_check.rounded import check_quantized
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions, require_memory
from promptq.worker.engine.native.build import NativeCodeError
from promptq.worker.engine.native.library import NativeError
from promptq.worker.engine.quantization.fp8_weight import HAS_FP8
from promptq.worker.engine.quantization.modules import (
    FewBits,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    quantize_model,
    with_plain_modules,
)

BITS = {"int8": 8, "int4": 4}

logger = logging.getLogger(__name__)


def is_quantized(loaded: LoadedModel, options: LoadOptions) -> bool:
    """Whether the files are quantized, or the options round weights or the KV cache."""
    return bool(loaded.format or rounding_options(options))


def check_quantization(options: LoadOptions, device: torch.device) -> None:
    """Raise ConfigurationError if the options or the device rule out the requested quantization."""
    if options.quantization not in ("none", *BITS):
        raise ConfigurationError(
            f"--quantization: {options.quantization!r} is not one of none, {', '.join(BITS)}"
        )
    if not (rounding := rounding_options(options)):
        return
    if not options.native:
        raise ConfigurationError(f"{rounding} needs promptq's code; omit --no-native")
    if options.kv_cache_dtype == "auto":
        return
    wanted = "int8" if device.type == "cpu" else "fp8"
    if options.kv_cache_dtype != wanted:
        raise ConfigurationError(
            f"--kv-cache-dtype: {options.kv_cache_dtype} does not work on {device}; use {wanted}"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < HAS_FP8:
        raise ConfigurationError(
            "--kv-cache-dtype: fp8 needs a card of compute capability 8.9 or higher, and"
            f" {device} has {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"
        )


def quantize(loaded: LoadedModel, checked: CheckedModel, options: LoadOptions) -> CheckedModel:
    """Replace the weights of a checked model by quantized weights. Returns the model with the
    requested format of the KV cache in its specs.

    Checks the decoder's logits, unless an earlier load has checked them or `check_packed` checks
    them later. For a model that none of promptq's decoders serves, dequantizes the files' quantized
    weights, or raises UnsupportedModelError if the options require rounding.
    """
    rounding = rounding_options(options)
    if checked.decoder is None:
        if rounding:
            raise UnsupportedModelError(
                f"{loaded.family}: {rounding} needs promptq's code, which does not serve this model"
                f" ({checked.why_no_own_code})"
            )
        _warn_of_wide(loaded, "all", checked.why_no_own_code)
        give_back(loaded.model.device)
        require_memory(loaded.name, _more_bytes(loaded), loaded.model.device, is_widened=True)
        with_plain_modules(loaded.model)
        return checked
    bits, decoder = BITS.get(options.quantization), checked.decoder
    if loaded.format and bits is None and (wide := _num_wide_linears(loaded)):
        _warn_of_wide(loaded, str(wide), "--quantization int8 rounds them")
    if not (rounding or _quantized_weights(loaded)):
        return checked
    group, embeddings = options.quantization_group, options.quantize_embeddings
    try:
        if rounding:
            quantize_model(loaded.model, bits, group, embeddings=embeddings)
    except (NativeError, NativeCodeError) as error:
        raise UnsupportedModelError(
            f"{loaded.name}: {rounding}: a weight cannot be rounded: {error}"
        ) from error
    if options.kv_cache_dtype == "int8":
        checked = replace(checked, specs=[spec.in_int8() for spec in checked.specs])
    elif options.kv_cache_dtype == "fp8":
        checked = replace(checked, specs=[spec.in_fp8() for spec in checked.specs])
    if decoder.unpacked is None and not checked.is_known:
        check_quantized(loaded, checked, rounding)
    return checked


def _num_wide_linears(loaded: LoadedModel) -> int:
    """Returns the number of linear layers without quantized weights, except the output layer."""
    model: Any = loaded.model
    head = model.get_output_embeddings()
    return sum(type(module) is nn.Linear and module is not head for module in model.modules())


def _more_bytes(loaded: LoadedModel) -> int:
    """Returns how many more bytes the quantized modules take if they are dequantized."""
    weights = {id(weight): weight for weight in _quantized_weights(loaded)}.values()
    wide = sum(prod(weight.shape) for weight in weights) * loaded.model.dtype.itemsize
    return wide - sum(each.nbytes for weight in weights for each in weight.tensors)


def _quantized_weights(loaded: LoadedModel) -> list[FewBits]:
    model: nn.Module = loaded.model
    weights: list[FewBits] = []
    for module in model.modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            weights.append(module.quantized)
        elif isinstance(module, QuantizedExperts):
            weights += module.weight.parts
    return weights


def _warn_of_wide(loaded: LoadedModel, which: str, reason: str) -> None:
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    logger.warning(
        "%s of the linear layers of %s (%s) take the memory and time of %s: %s",
        *(which, loaded.name, loaded.format, dtype, reason),
    )


def rounding_options(options: LoadOptions) -> str:
    """Returns the options that cause rounding, as a text; empty if there are none."""
    names = []
    if options.quantization != "none":
        names.append(f"--quantization {options.quantization}")
    if options.kv_cache_dtype != "auto":
        names.append(f"--kv-cache-dtype {options.kv_cache_dtype}")
    return " ".join(names)
