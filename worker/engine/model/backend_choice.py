"""Chooses the device, the attention backend and promptq's decoder for a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

import torch

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.torch_paged import TorchPaged
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.attention.types import LayerSpec
from promptq.worker.engine.decoders.base import Decoder
from promptq.worker.engine.decoders.native import DTYPES, NativeDecoder
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.native.build import NativeCodeError
from promptq.worker.engine.native.library import load_native

BACKENDS: tuple[type[AttentionBackend], ...] = (TritonPaged, TorchPaged)
"""All backends, the fastest first."""

TURNED_OFF = "it is turned off"

logger = logging.getLogger(__name__)


def backends_on(device: torch.device, name: str) -> list[AttentionBackend]:
    """Returns the backends that run on the device, the fastest first. If `name` is not `auto`,
    returns only the backend of this name.

    Raises ConfigurationError if no such backend exists, or if the backend does not run on the
    device.
    """
    if name != "auto" and name not in (names := [each.name for each in BACKENDS]):
        raise ConfigurationError(f"--attention: {name!r} is not one of auto, {', '.join(names)}")
    usable: list[AttentionBackend] = []
    for backend in BACKENDS:
        if name not in ("auto", backend.name):
            continue
        if device.type not in backend.devices:
            why_not = f"runs on {' or '.join(sorted(backend.devices))}, and the device is {device}"
        elif backend.needs and find_spec(backend.needs) is None:
            why_not = f"needs the package {backend.needs}, which is not installed"
        else:
            usable.append(backend())
    if not usable:
        raise ConfigurationError(f"--attention: {name!r} {why_not}")
    return usable


def first_that_serves(
    family: str, backends: Sequence[AttentionBackend], specs: list[LayerSpec]
) -> AttentionBackend:
    """Returns the first backend that serves every layer of a model. Raises UnsupportedModelError,
    with the reason of each backend, if none serves all layers."""
    reasons = []
    for backend in backends:
        if not (why_not := backend.why_not(specs)):
            return backend
        reasons.append(f"{backend.name}: {why_not}")
    raise UnsupportedModelError(f"{family}: no attention backend serves it: {'; '.join(reasons)}")


def resolve_device(name: str) -> torch.device:
    """Returns the device of this name. `auto` is the first CUDA device, else the CPU. Raises
    ConfigurationError if the device cannot be used."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device: torch.device | None = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"--device: {name!r} is not one of auto, cpu, cuda, cuda:N")
    if device.type == "cpu":
        return device
    index = device.index or 0
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise ConfigurationError(f"--device: {name!r} is not a usable CUDA device here")
    return torch.device("cuda", index)


def why_no_native_code(loaded: LoadedModel) -> str:
    """Returns why native code cannot serve this device and dtype; empty if it can."""
    device, dtype = loaded.model.device, loaded.model.dtype
    if device.type != "cpu":
        return f"it is for the CPU, and the device is {device.type}"
    if dtype not in DTYPES:
        return f"it computes in {' or '.join(map(str, DTYPES))}, and the weights are {dtype}"
    try:
        load_native()
    except NativeCodeError as error:
        cost = "most models make a fifth of the tokens or less"
        logger.warning("no native code, so %s: %s", cost, error)
        return "it could not be compiled (see the log)"
    return ""


def own_decoders(
    device: torch.device, options: LoadOptions, no_native_code: str
) -> tuple[list[type[Decoder]], str]:
    """Returns promptq's decoders to try on the device, and the reason if there are none.
    `no_native_code`, the result of `why_no_native_code`, matters only on a CPU."""
    if not options.native:
        return [], TURNED_OFF
    if device.type == "cuda":
        if options.attention not in ("auto", TritonPaged.name):
            return [], f"--attention {options.attention} was requested"
        if find_spec(TritonPaged.needs) is None:
            return [], f"they need the package {TritonPaged.needs}, which is not installed"
        from promptq.worker.engine.decoders.kernels.fused import FusedDecoder

        return [FusedDecoder], ""
    if no_native_code:
        return [], no_native_code
    if options.attention != "auto":
        return [], f"--attention {options.attention} was requested"
    return [NativeDecoder], ""


def decoder_of_saved_weights(device: torch.device, options: LoadOptions) -> type[Decoder] | None:
    """Returns the decoder that can use quantized weights in their saved format. None if all weights
    must be dequantized, because other code will compute the model."""
    if device.type == "cpu" and options.dtype == "float16":  # native code has no fp16
        return None
    decoders, _ = own_decoders(device, options, "")
    return next(iter(decoders), None)
