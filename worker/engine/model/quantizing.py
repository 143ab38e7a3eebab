"""Rounds the weights of a loaded model, and its KV cache, for the native decoder."""

from __future__ import annotations

from dataclasses import replace

import torch

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.worker.engine.llama.native_decoder import NativeDecoder
from promptq.worker.engine.model.load_check import CheckedModel, check_quantized
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.native.library import NativeError
from promptq.worker.engine.quantization.modules import quantize_model

BITS = {"int8": 8, "int4": 4}


def is_quantized(options: LoadOptions) -> bool:
    """Whether anything is rounded."""
    return bool(_asked(options))


def check_quantization(options: LoadOptions, device: torch.device) -> None:
    """Refuse what the options or the device rule out, before anything is loaded.

    Raises ConfigurationError.
    """
    if options.quantization not in ("none", *BITS):
        raise ConfigurationError(
            f"--quantization: {options.quantization!r} is none of none, {', '.join(BITS)}"
        )
    if not (asked := _asked(options)):
        return
    if device.type != "cpu":
        raise ConfigurationError(
            f"{asked} is for the CPU, and the device is {device}; leave it out, or use --device cpu"
        )
    if not options.native:
        raise ConfigurationError(f"{asked} needs native code; omit --no-native")


def quantize(
    loaded: LoadedModel, checked: CheckedModel, options: LoadOptions, *, is_known: bool
) -> CheckedModel:
    """Round the weights of a checked model in place, and check what the decoder makes of them,
    unless this is known. Returns the model with the cache that was asked for.

    Raises UnsupportedModelError if no native decoder serves the model.
    """
    asked = _asked(options)
    if checked.decoder is not NativeDecoder:
        raise UnsupportedModelError(
            f"{loaded.family}: {asked} needs native code, which does not serve this model"
            f" ({checked.why_no_own_code})"
        )
    if options.quantization != "none":
        bits = BITS[options.quantization]
        group = options.quantization_group if bits == 4 else None
        try:
            quantize_model(loaded.model, bits, group, embeddings=options.quantize_embeddings)
        except NativeError as error:
            raise UnsupportedModelError(
                f"{loaded.name}: {asked}: a weight cannot be rounded: {error}"
            ) from error
    if options.kv_cache_dtype == "int8":
        checked = replace(checked, specs=[spec.in_int8() for spec in checked.specs])
    if not is_known:
        check_quantized(loaded, checked, asked)
    return checked


def _asked(options: LoadOptions) -> str:
    """The options that ask for rounding, or nothing."""
    asked = []
    if options.quantization != "none":
        asked.append(f"--quantization {options.quantization}")
    if options.kv_cache_dtype != "auto":
        asked.append(f"--kv-cache-dtype {options.kv_cache_dtype}")
    return " ".join(asked)
