"""Loads the native code and declares its functions. src/interface.h documents the functions."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char_p, c_double, c_int64, c_void_p
from functools import cache
from typing import Any

import torch  # noqa: F401  # its OpenMP runtime, libgomp.so.1, must be there first

from promptq.worker.engine.native.build import NativeCodeError, library_path


def _all(kind: type[Any], *names: str) -> tuple[tuple[str, type[Any]], ...]:
    """Returns a ctypes field of type `kind` for each name."""
    return tuple((name, kind) for name in names)


class Pattern(Structure):
    _fields_ = _all(c_int64, "kind", "size")


class LayerCache(Structure):
    _fields_ = (
        *_all(c_void_p, "keys", "values"),
        *_all(c_int64, "num_kv_heads", "block_size", "head_size", "value_size"),
        *_all(c_int64, "block_stride", "head_stride", "position_stride", "is_int8"),
        ("pattern", Pattern),
    )


class Layout(Structure):
    _fields_ = (
        *_all(c_int64, "num_sequences", "max_blocks"),
        *_all(c_void_p, "query_starts", "context_lens", "block_tables"),
        *_all(c_void_p, "write_blocks", "write_offsets"),
    )


class Norm(Structure):
    _fields_ = (*_all(c_void_p, "weight", "bias"), ("epsilon", c_double), ("is_centered", c_int64))


class Rotation(Structure):
    _fields_ = (*_all(c_void_p, "cosine", "sine"), *_all(c_int64, "num_pairs", "is_interleaved"))


class Scoring(Structure):
    _fields_ = (*_all(c_double, "scale", "softcap"), ("sinks", c_void_p))


class Convolution(Structure):
    _fields_ = (
        *_all(c_void_p, "weight", "bias"),
        *_all(c_int64, "num_channels", "size"),
        ("windows", c_void_p),
    )


class StateEntries(Structure):
    _fields_ = _all(c_void_p, "read", "written", "num_drafted")


class ModelShape(Structure):
    _fields_ = (
        *_all(c_int64, "is_bf16", "is_packed", "size", "vocab_size"),
        *_all(c_double, "embedding_scale", "logit_scale", "logit_softcap"),
    )


class Weight(Structure):
    _fields_ = (
        *_all(c_void_p, "numbers", "scales", "offsets"),
        *_all(c_int64, "bits", "group", "row_stride", "column_stride"),
    )


class LayerInputsWeights(Structure):
    _fields_ = (
        *_all(c_int64, "num_layers", "size"),
        ("table", Weight),
        ("table_scale", c_double),
        ("projection", Weight),
        ("projection_scale", c_double),
        ("norm", Norm),
        ("scale", c_double),
    )


class LayerInputWeights(Structure):
    _fields_ = (
        *_all(c_int64, "size", "activation"),
        *_all(Weight, "gate", "output"),
        ("after", Norm),
    )


class ModelWeights(Structure):
    _fields_ = (
        ("embedding", Weight),
        ("norm", Norm),
        ("head", Weight),
        ("head_bias", c_void_p),
        ("inputs", POINTER(LayerInputsWeights)),
    )


class AttentionWeights(Structure):
    _fields_ = (
        *_all(c_int64, "num_heads", "shares_kv", "is_gated"),
        *_all(Weight, "query", "key", "value"),
        ("qkv_bias", c_void_p),
        *_all(Norm, "query_norm", "key_norm", "value_norm"),
        *_all(c_int64, "norms_whole_rows", "norms_rotated"),
        ("rotation", Rotation),
        ("scoring", Scoring),
        ("output", Weight),
        ("output_bias", c_void_p),
        ("cache", LayerCache),
    )


class LatentAttentionWeights(Structure):
    _fields_ = (
        *_all(c_int64, "num_heads", "key_size", "value_size", "query_rank"),
        *_all(Weight, "query_down", "down"),
        ("input_bias", c_void_p),
        ("query_norm", Norm),
        ("query", Weight),
        ("query_bias", c_void_p),
        ("norm", Norm),
        ("rotation", Rotation),
        ("scoring", Scoring),
        *_all(Weight, "up", "output"),
        ("output_bias", c_void_p),
        ("cache", LayerCache),
    )


class MlpWeights(Structure):
    _fields_ = (
        *_all(c_int64, "inner_size", "activation", "is_gated"),
        ("gate_scale", c_double),
        ("numbers", c_double * 4),
        *_all(Weight, "gate", "up"),
        ("input_bias", c_void_p),
        ("down", Weight),
        ("down_bias", c_void_p),
    )


class Routing(Structure):
    _fields_ = (
        *_all(c_int64, "num_experts", "top_k", "scores"),
        ("choice_bias", c_void_p),
        *_all(c_int64, "num_groups", "top_groups", "normalizes"),
        *_all(c_double, "added_sum", "scale", "jitter"),
        ("expert_scales", c_void_p),
    )


class ExpertWeights(Structure):
    _fields_ = (
        ("routing", Routing),
        ("router", Weight),
        ("router_bias", c_void_p),
        *_all(c_int64, "has_shared_gate", "num_mlps"),
        ("mlps", POINTER(MlpWeights)),
    )


class ExpertsBesideWeights(Structure):
    _fields_ = (
        ("experts", ExpertWeights),
        *_all(Norm, "before_router", "before", "after", "after_mlp"),
    )


class ShortConvolutionWeights(Structure):
    _fields_ = (
        ("input", Weight),
        ("input_bias", c_void_p),
        ("convolution", Convolution),
        ("output", Weight),
        ("output_bias", c_void_p),
    )


class RowsOfWeight(Structure):
    _fields_ = (("weight", Weight), *_all(c_int64, "first", "count"))


class RecurrenceWeights(Structure):
    _fields_ = (
        *_all(c_int64, "is_delta", "num_key_heads", "num_value_heads", "key_size", "value_size"),
        ("num_inputs", c_int64),
        ("inputs", POINTER(RowsOfWeight)),
        *_all(c_void_p, "input_bias", "input_scale"),
        *_all(c_int64, "gate_inputs", "time_inputs"),
        *_all(Weight, "gates", "times"),
        *_all(c_void_p, "gates_bias", "times_bias"),
        ("has_key_decays", c_int64),
        ("convolution", Convolution),
        *_all(c_int64, "query_first", "key_first", "value_first"),
        ("query_scale", c_double),
        *_all(c_void_p, "time_bias", "decay"),
        *_all(c_double, "least_time", "most_time", "most_rate"),
        ("skip", c_void_p),
        ("norm", Norm),
        *_all(c_int64, "norm_size", "gates_first", "has_sigmoid"),
        ("output", Weight),
        ("output_bias", c_void_p),
        ("states", c_void_p),
    )


class LayerWeights(Structure):
    _fields_ = (
        *_all(Norm, "before_mixer", "after_mixer", "before_mlp", "after_mlp"),
        ("is_parallel", c_int64),
        *_all(c_double, "mixer_scale", "beside_scale", "mlp_scale", "output_scale"),
        ("attention", POINTER(AttentionWeights)),
        ("latent", POINTER(LatentAttentionWeights)),
        ("convolution", POINTER(ShortConvolutionWeights)),
        ("recurrence", POINTER(RecurrenceWeights)),
        ("mlp", POINTER(MlpWeights)),
        ("experts", POINTER(ExpertWeights)),
        ("experts_beside", POINTER(ExpertsBesideWeights)),
        ("input", POINTER(LayerInputWeights)),
    )


class Step(Structure):
    _fields_ = (
        ("num_rows", c_int64),
        *_all(c_void_p, "ids", "positions"),
        ("num_outputs", c_int64),
        ("outputs", c_void_p),
        ("num_kept", c_int64),
        ("kept", c_void_p),
        ("layout", Layout),
        ("entries", StateEntries),
        *_all(c_void_p, "logits", "states"),
    )


class HeadWeights(Structure):
    _fields_ = (
        *_all(Norm, "of_embedding", "of_state"),
        ("projection", Weight),
        ("layer", LayerWeights),
        ("last", Norm),
    )


class Choice(Structure):
    _fields_ = (
        *_all(c_void_p, "is_sampled", "temperature", "filters"),
        ("num_filters", c_int64),
        ("uniforms", c_void_p),
    )


class Draft(Structure):
    _fields_ = (
        ("step", Step),
        *_all(c_void_p, "states", "num_drafted"),
        ("most_drafted", c_int64),
        ("choice", Choice),
        ("tokens", c_void_p),
    )


class NativeError(Exception):
    """Raised if a call of native code failed, for example because memory was short."""


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "decoder_new": (POINTER(ModelShape), POINTER(ModelWeights), c_int64, POINTER(c_void_p)),
    "decoder_add_layer": (c_void_p, POINTER(LayerWeights)),
    "decoder_run": (c_void_p, POINTER(Step)),
    "decoder_add_head": (c_void_p, POINTER(HeadWeights)),
    "decoder_draft": (c_void_p, POINTER(Draft)),
    "choose_tokens": (
        *(c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p),
        *(c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
    ),
    "report_logprobs": (
        *(c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p),
        *(c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "quantize": (
        *(c_int64, c_void_p, c_int64, c_int64, c_int64, c_int64),
        *(c_int64, c_void_p, c_void_p),
    ),
    "paged_attention": (
        *(c_int64, c_void_p, c_int64, POINTER(LayerCache)),
        *(POINTER(Layout), POINTER(Scoring), c_void_p),
    ),
    "linear": (
        *(c_int64, c_int64, c_void_p, c_int64, POINTER(Weight)),
        *(c_int64, c_int64, c_void_p, c_void_p),
    ),
    "experts": (
        *(c_int64, c_int64, c_void_p, c_int64, c_int64),
        *(POINTER(ExpertWeights), c_int64, c_void_p),
    ),
}
"""The native functions that can fail, with the types of their arguments."""


@cache
def load_native() -> Any:
    """Returns the library of native code, and compiles it first if there is none for this machine.

    The library's functions release Python's interpreter lock, and raise NativeError if they fail.
    Raises NativeCodeError if the library cannot be compiled or loaded.
    """
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype, function.errcheck = arguments, c_char_p, _check
    except (OSError, AttributeError) as error:
        raise NativeCodeError(f"{path} does not load: {error}") from error
    library.decoder_free.argtypes, library.decoder_free.restype = (c_void_p,), None
    library.has_tile_registers.restype = c_bool
    library.keep_freed_memory.restype = None
    library.keep_freed_memory()
    return library


def _check(error: bytes | None, function: Any, arguments: Any) -> None:  # as ctypes calls it
    if error is not None:
        raise NativeError(error.decode(errors="replace"))
