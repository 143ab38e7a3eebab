"""Gives the native decoder weights of few bits, saved or rounded, and such a KV cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.worker.engine.llama.native_decoder import NativeDecoder
from promptq.worker.engine.model.load_check import CheckedModel, check_quantized
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.native.library import NativeError
from promptq.worker.engine.quantization.modules import quantize_model

BITS = {"int8": 8, "int4": 4}

logger = logging.getLogger(__name__)


def is_quantized(loaded: LoadedModel, options: LoadOptions) -> bool:
    """Whether anything was saved in few bits, or is to be rounded."""
    return bool(loaded.format or _asked(options))


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
    """Replace the weights of a checked model by quantized ones, and check what the decoder makes of
    them, unless this is known. Returns the model with the cache that was asked for.

    Weights that were saved in few bits are served as wide numbers where there is no native decoder.
    Raises UnsupportedModelError if none serves the model and something has to be rounded.
    """
    asked = _asked(options)
    if checked.decoder is not NativeDecoder:
        if asked:
            raise UnsupportedModelError(
                f"{loaded.family}: {asked} needs native code, which does not serve this model"
                f" ({checked.why_no_own_code})"
            )
        _warn_of_wide(loaded, "all", checked.why_no_own_code)
        loaded.quantized.clear()
        return checked
    bits = BITS.get(options.quantization)
    if loaded.format and bits is None and (wide := _wide(loaded)):
        _warn_of_wide(loaded, str(wide), "--quantization int8 rounds them")
    try:
        quantize_model(
            loaded.model,
            bits,
            options.quantization_group,
            embeddings=options.quantize_embeddings,
            saved=loaded.quantized,
        )
    except NativeError as error:
        raise UnsupportedModelError(
            f"{loaded.name}: {asked}: a weight cannot be rounded: {error}"
        ) from error
    loaded.quantized.clear()  # the modules have them
    if options.kv_cache_dtype == "int8":
        checked = replace(checked, specs=[spec.in_int8() for spec in checked.specs])
    if not is_known:
        check_quantized(loaded, checked, asked or f"the quantization {loaded.format}")
    return checked


def _wide(loaded: LoadedModel) -> int:
    """How many linear layers have no weights of few bits, beside the output layer."""
    model: Any = loaded.model
    linears = {name for name, it in model.named_modules() if type(it) is nn.Linear}
    heads = {name for name, it in model.named_modules() if it is model.get_output_embeddings()}
    return len(linears - loaded.quantized.keys() - heads)


def _warn_of_wide(loaded: LoadedModel, which: str, reason: str) -> None:
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    logger.warning(
        "%s of the linear layers of %s (%s) take the memory and time of %s: %s",
        *(which, loaded.name, loaded.format, dtype, reason),
    )


def _asked(options: LoadOptions) -> str:
    """The options that ask for rounding, or nothing."""
    asked = []
    if options.quantization != "none":
        asked.append(f"--quantization {options.quantization}")
    if options.kv_cache_dtype != "auto":
        asked.append(f"--kv-cache-dtype {options.kv_cache_dtype}")
    return " ".join(asked)
