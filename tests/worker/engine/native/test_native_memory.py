"""A lack of memory inside a step is an error of the step."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run
from tests.worker.engine.tiny_models import save_model

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
        *(sys.executable, "-m", "tests.worker.engine.native.starved", library, *models),
        env={**os.environ, "LD_PRELOAD": str(library)},
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["std::bad_alloc"] * len(FAMILIES)
