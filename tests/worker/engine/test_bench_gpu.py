"""The GPU benchmark's script, on a small model, without a GPU, and with little installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.paths import ROOT

RUN_BARE = """
import runpy, sys
for name in ("pydantic", "pydantic_settings", "redis", "structlog"):
    sys.modules[name] = None
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
def test_checks_and_measures(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    options = ["--tiny", "--device", "cpu", "--without-peers", "--json", str(written)]
    done = subprocess.run(
        [sys.executable, "-c", RUN_BARE, *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(written.read_text())
    assert "as `generate`" in figures["whole models"]
    assert figures["engine"] > 0
    assert figures["engine, compiled"] > 0
    assert {name for name in figures if name.startswith(("decode", "prefill", "attention"))} == {
        "attention, decode, Triton",
        "attention, prefill, Triton",
        "decode, 3 of length 40, eager",
        "decode, 3 of length 40, graph",
        "decode, 3 of length 40, compiled, without graph",
        "decode, 3 of length 40, compiled, graph",
        "prefill, 2 of length 20",
        "prefill, 2 of length 20, compiled",
    }
    assert all(figures[name]["ms"] > 0 for name in figures if name.startswith("decode"))
