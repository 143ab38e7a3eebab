"""Loads models while memory runs out inside parallel regions of native code.

Arguments: the library made of starved.c, which must be preloaded, and directories of models. For
each model, it prints why native code does not serve it.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.native.library import load_native
from promptq.worker.engine.runner.load_runner import load_runner


def main(library: str, *directories: str) -> None:
    torch.set_num_threads(2)
    native, starving = load_native(), ctypes.CDLL(library)
    in_region = ctypes.cast(native.omp_in_parallel, ctypes.c_void_p)
    run = native.decoder_run

    def run_starved(*arguments: Any) -> Any:
        starving.starve_in(in_region)
        try:
            return run(*arguments)
        finally:
            starving.starve_in(None)

    native.decoder_run = run_starved
    options = LoadOptions(device="cpu", dtype="float32", block_size=4, kv_cache_memory=8_000_000)
    for directory in directories:
        print(load_runner(directory, options).why_no_own_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
