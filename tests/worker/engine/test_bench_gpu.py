"""The GPU benchmark's script, on a small model, without a GPU, and with little installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

RUN_BARE = """
import runpy, sys
for name in ("pydantic", "pydantic_settings", "redis", "structlog"):
    sys.modules[name] = None
import triton.runtime.interpreter
from tests.support import library_caches
library_caches.install()
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


FORMATS = ("int8", "int4", "fp8", "K and V in fp8", "int4, K and V in fp8")
DECODES = ("2 of length 24", "1 of length 24", "one of length 40 among 1 of 24")


def check_engine(figures: dict[str, Any], said: str) -> None:
    assert "as `generate`" in figures["whole models"]
    assert "against fp64" in figures["experts"]
    assert figures["engine"] > 0
    assert figures["engine, compiled"] > 0
    assert {name for name in figures if name.startswith(("decode", "prefill", "attention"))} == {
        "attention, decode, Triton",
        "attention, prefill, Triton",
        *(f"decode, {what}, {way}" for what in DECODES for way in ("eager", "graph")),
        "decode, 2 of length 24, compiled, without graph",
        "decode, 2 of length 24, compiled, graph",
        "prefill, 2 of length 9",
        "prefill, 2 of length 9, compiled",
    }
    assert all(figures[name]["ms"] > 0 for name in figures if name.startswith("decode"))
    params = ("top_p", "penalties", "logprobs")
    for served in ("1 at once", "4 at once", *(f"2 at once, {each}" for each in params)):
        assert figures[f"serving, {served}"] > 0
    assert figures["a prompt of 30 beside 2 decodes"]["first token"] > 0
    assert "first token p50" in figures["Poisson arrivals at 70% of that rate"]
    table = figures["table"]
    assert {name: row["target"] for name, row in table.items()} == {
        "decode, 2 of length 24": 0.8,
        "decode, 1 of length 24": 0.78,
        "decode, one of length 40 among 1 of 24": 0.8,
        "prefill, 2 of length 9": 0.55,
        "over transformers' continuous batching": 2.5,
        "over vLLM, 1 at once": 1.2,
        "over vLLM, 64 at once": 1.0,
        "over vLLM, 256 at once": 1.0,
    }
    for name, row in table.items():
        if name.startswith("over"):
            assert row["verdict"].startswith("not measured: ")
        else:
            assert row["verdict"] == ("pass" if row["figure"] >= row["target"] else "miss")
    assert "torch's varlen_attn: not here: it needs CUDA" in said


def check_fewer_bits(figures: dict[str, Any], _: str) -> None:
    assert "against fp64" in figures["products"]
    for name in FORMATS:
        assert {it.removeprefix(f"{name}: ") for it in figures if it.startswith(f"{name}: ")} == {
            *(f"decode, {what}, {way}" for what in DECODES for way in ("eager", "graph")),
            "prefill, 2 of length 9",
        }
    assert figures["int4: prefill, 2 of length 9"]["share"] > 0
    assert figures["fp8: prefill, 2 of length 9"]["share"] is None


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
@pytest.mark.parametrize(
    ("option", "check"), [("--without-peers", check_engine), ("--fewer-bits", check_fewer_bits)]
)
def test_checks_and_measures(
    tmp_path: Path, option: str, check: Callable[[dict[str, Any], str], None]
) -> None:
    written = tmp_path / "figures.json"
    options = ["--tiny", "--device", "cpu", option, "--json", str(written), "--seconds", "inf"]
    done = subprocess.run(
        [sys.executable, "-c", RUN_BARE, *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads(written.read_text()), done.stdout)
