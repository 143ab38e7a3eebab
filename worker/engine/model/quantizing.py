"""Rounds the weights of a loaded model for the native decoder."""

from __future__ import annotations

import torch

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.worker.engine.llama.native_decoder import NativeDecoder
from promptq.worker.engine.model.load_check import CheckedModel, check_quantized
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.native.library import NativeError
from promptq.worker.engine.quantization.modules import quantize_model

BITS = {"int8": 8, "int4": 4}


def check_quantization(options: LoadOptions, device: torch.device) -> None:
    """Refuse a quantization that the options or the device rule out, before anything is loaded.

    Raises ConfigurationError.
    """
    asked = options.quantization
    if asked == "none":
        return
    if asked not in BITS:
        raise ConfigurationError(f"--quantization: {asked!r} is none of none, {', '.join(BITS)}")
    if device.type != "cpu":
        raise ConfigurationError(
            f"--quantization: {asked} is for the CPU, and the device is {device}; leave it out, or"
            " use --device cpu"
        )
    if not options.native:
        raise ConfigurationError(f"--quantization: {asked} needs native code; omit --no-native")


def quantize(loaded: LoadedModel, checked: CheckedModel, options: LoadOptions) -> None:
    """Round the weights of a checked model in place, and check what the decoder makes of them.

    Raises UnsupportedModelError if no native decoder serves the model.
    """
    asked = options.quantization
    if checked.decoder is not NativeDecoder:
        raise UnsupportedModelError(
            f"{loaded.family}: --quantization {asked} needs native code, which does not serve this"
            f" model ({checked.why_no_own_code})"
        )
    group = options.quantization_group if asked == "int4" else None
    try:
        quantize_model(loaded.model, BITS[asked], group, embeddings=options.quantize_embeddings)
    except NativeError as error:
        raise UnsupportedModelError(
            f"{loaded.name}: --quantization {asked}: a weight cannot be rounded: {error}"
        ) from error
    check_quantized(loaded, checked)
