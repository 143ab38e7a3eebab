"""Finds a model's recurrent modules, and modules that remember earlier tokens in an unknown way."""

from __future__ import annotations

import inspect
from collections.abc import Collection

from torch import nn

from promptq.worker.engine.recurrent.gated_delta_net import GatedDeltaNet
from promptq.worker.engine.recurrent.kimi_delta_attention import KimiDeltaAttention
from promptq.worker.engine.recurrent.mamba2 import Mamba2
from promptq.worker.engine.recurrent.mixer import Mixer
from promptq.worker.engine.recurrent.short_convolution import ShortConvolution

KINDS: tuple[type[Mixer], ...] = (GatedDeltaNet, KimiDeltaAttention, Mamba2, ShortConvolution)

_CACHES = {"cache_params", "past_key_values", "past_key_value"}
"""Argument names by which transformers passes a cache of earlier tokens to modules."""


def mixer_of(module: nn.Module) -> Mixer | None:
    """Returns the mixer of a recurrent module; None if the module is not of a known kind."""
    return next((kind(module) for kind in KINDS if kind.knows(module)), None)


def mixers_of(model: nn.Module) -> list[Mixer]:
    """Returns the mixers of all recurrent modules of known kinds, in the model's order."""
    return [mixer for module in model.modules() if (mixer := mixer_of(module)) is not None]


def unknown_memory(model: nn.Module, known: Collection[nn.Module]) -> str:
    """Returns the name and type of a module that remembers tokens but is not in `known`; empty if
    there is none. If such modules are nested, returns the innermost one.

    Whole layers are ignored, because even layers with only an MLP accept transformers' cache.
    """
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers = {layer for layers in lists for layer in layers}
    remembering = [
        (name, module)
        for name, module in model.named_modules()
        if module not in layers and _CACHES & inspect.signature(module.forward).parameters.keys()
    ]
    modules = {module for _, module in remembering}
    for name, module in remembering:
        if module not in known and modules.isdisjoint({*module.modules()} - {module}):
            return f"{name} ({type(module).__name__})"
    return ""
