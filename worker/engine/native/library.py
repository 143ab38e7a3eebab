"""Loads the native code and declares its functions; src/interface.h documents each."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char_p, c_double, c_int64, c_void_p
from functools import cache
from typing import Any

import torch  # noqa: F401  # its OpenMP runtime, libgomp.so.1, must be there first

from promptq.worker.engine.native.build import NativeCodeError, library_path


class Pattern(Structure):
    _fields_ = (("kind", c_int64), ("size", c_int64))


class LayerCache(Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_size", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("position_stride", c_int64),
        ("is_int8", c_int64),
        ("pattern", Pattern),
    )


class Layout(Structure):
    _fields_ = (
        ("num_sequences", c_int64),
        ("max_blocks", c_int64),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("write_blocks", c_void_p),
        ("write_offsets", c_void_p),
    )


class ModelShape(Structure):
    _fields_ = (
        ("is_bf16", c_int64),
        ("is_packed", c_int64),
        ("size", c_int64),
        ("inner_size", c_int64),
        ("vocab_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_size", c_int64),
        ("rotary", c_int64),
        ("epsilon", c_double),
        ("scale", c_double),
    )


class Weight(Structure):
    _fields_ = (
        ("numbers", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("bits", c_int64),
        ("group", c_int64),
    )


class ModelWeights(Structure):
    _fields_ = (
        ("embedding", Weight),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("norm", c_void_p),
        ("head", Weight),
    )


class LayerWeights(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("query", Weight),
        ("key", Weight),
        ("value", Weight),
        ("qkv_bias", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", Weight),
        ("output_bias", c_void_p),
        ("inner_norm", c_void_p),
        ("gate", Weight),
        ("up", Weight),
        ("down", Weight),
        ("cache", LayerCache),
    )


class Step(Structure):
    _fields_ = (
        ("num_rows", c_int64),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("num_outputs", c_int64),
        ("outputs", c_void_p),
        ("num_kept", c_int64),
        ("kept", c_void_p),
        ("layout", Layout),
        ("logits", c_void_p),
        ("states", c_void_p),
    )


class NativeError(Exception):
    """A call of native code failed, for example for want of memory."""


_TAKES: dict[str, tuple[Any, ...]] = {
    "decoder_new": (POINTER(ModelShape), POINTER(ModelWeights), c_int64, POINTER(c_void_p)),
    "decoder_add_layer": (c_void_p, POINTER(LayerWeights)),
    "decoder_run": (c_void_p, POINTER(Step)),
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
        *(POINTER(Layout), c_double, c_void_p),
    ),
    "linear": (
        *(c_int64, c_int64, c_void_p, c_int64, POINTER(Weight)),
        *(c_int64, c_int64, c_void_p, c_void_p),
    ),
}
"""The functions that can fail, and their arguments."""


@cache
def load_native() -> Any:
    """The library of the code in `src`. Its functions release the interpreter lock, and raise
    NativeError if they fail.

    It is compiled first if there is none. Raises NativeCodeError if this is impossible.
    """
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
        for name, takes in _TAKES.items():
            function = getattr(library, name)
            function.argtypes, function.restype, function.errcheck = takes, c_char_p, _check
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
