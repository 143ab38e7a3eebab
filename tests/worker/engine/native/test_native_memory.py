"""A lack of memory inside a step is an error of the step."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.native.library import load_native
from promptq.worker.engine.runner.load_runner import load_runner
from tests.support.paths import ROOT
from tests.support.processes import run
from tests.worker.engine.tiny_models import save_model


def main(library: str, *directories: str) -> None:
    """Loads models while memory runs out inside parallel regions of native code. Prints for each
    why native code does not serve it. The library made of starved.c must be preloaded."""
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


SEED = 11
FAMILIES = ["qwen3_5_text", "lfm2"]


def test_a_lack_of_memory_in_a_parallel_region_ends_no_process(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        pytest.skip("there is no compiler")
    library = tmp_path / "starved.so"
    source = Path(__file__).parent / "starved.c"
    made = run(compiler, "-x", "c", "-shared", "-fPIC", source, "-o", library, "-ldl")
    assert made.returncode == 0, made.stderr
    models = [save_model(tmp_path / family, family, SEED) for family in FAMILIES]
    ended = run(
        *(sys.executable, "-m", "tests.worker.engine.native.test_native_memory", library, *models),
        env={**os.environ, "LD_PRELOAD": str(library)},
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["std::bad_alloc"] * len(FAMILIES)


if __name__ == "__main__":
    main(*sys.argv[1:])
