"""Tests the native code built with the address and undefined-behaviour sanitizers.

The address sanitizer ends a run at the first read or write outside an object, the other one at the
first operation whose result C++ leaves undefined. Each warning of the compiler is an error here.
The tests run a second time on the code for AVX2 alone. Instructions that a processor lacks are
emulated (emulated_avx512.h, emulated_tiles.h), but then without sanitizers, because GCC 12 makes
code from both together that does not run. A run takes some minutes: each kernel with the sizes at
its edges, and a tiny model with each kind of layer. With `--whole`, all tests of native code run,
which takes hours. Other arguments are passed to pytest and replace the tests.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from promptq.worker.engine.native.build import KINDS, processor_features

_ENGINE = "tests/worker/engine"
_FILES = [
    f"{_ENGINE}/native/test_native.py",
    f"{_ENGINE}/native/test_native_attention.py",
    f"{_ENGINE}/native/test_native_experts.py",
    f"{_ENGINE}/quantization/test_quantization.py",
    f"{_ENGINE}/sampling/test_sampler.py",
]
KERNELS = [
    f"{_FILES[0]}::test_products",
    f"{_FILES[0]}::test_products_with_quantized_weights",
    f"{_FILES[0]}::test_each_size_of_groups_is_multiplied_or_refused",
    f"{_FILES[1]}::test_equals_plain_attention",
    f"{_FILES[1]}::test_rows_in_int8_are_what_they_stand_for",
    f"{_FILES[2]}::test_each_familys_experts",
    f"{_FILES[2]}::test_odd_sizes",
    f"{_FILES[2]}::test_quantized_experts",
    f"{_FILES[3]}::test_weights_are_rounded_to_the_nearest",
]
OTHER_PARTS = [
    f"{_FILES[1]}::test_caps_scores_and_leaves_weight_to_sinks",
    f"{_FILES[1]}::test_sequences_may_share_blocks",
    *(
        f"{_FILES[4]}::{name}"
        for name in (
            "test_every_parameter_counts",
            "test_equals_the_librarys_processors",
            "test_bad_words_of_all_lengths",
            "test_logits_that_are_no_numbers_fail_their_row_alone",
        )
    ),
    f"{_ENGINE}/runner/test_head_drafts.py::test_drafts_are_those_of_the_library[glm4_moe-True]",
    *(
        f"{_ENGINE}/runner/test_right_tokens.py::test_chunks_preemption_and_prefixes[{family}]"
        for family in (
            *("gemma4_text", "gpt_oss", "deepseek_v3"),
            *("qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2"),
        )
    ),
]
"""Kernels that have no instructions to emulate, and models with each kind of layer."""
ONLY_NATIVE = ["-k", "not (test_sampler and torch)"]
"""Samplers of native code, not those of torch."""

BUILD = "from promptq.worker.engine.native.build import library_path; library_path()"

WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-maybe-uninitialized",  # which GCC 12 says of its own intrinsics
]
FLAGS = [
    *WARNINGS,
    "-O1",  # -O3 compiles for longer
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
]

PRELOADED = ["libasan.so", "libubsan.so", "libstdc++.so"]
"""Libraries to load before the interpreter, which is not built with them. The last one is there so
that the first can watch exceptions."""


_HERE = Path(__file__).parent
EMULATED_TILES = [
    *("-D__AMX_TILE__", "-D__AMX_BF16__", "-D__AMX_INT8__"),
    *("-include", str(_HERE / "emulated_tiles.h")),
]
EMULATED_AVX512 = [
    *(*KINDS["avx2"].flags, "-Wno-psabi", "-Wno-ignored-attributes"),
    *("-include", str(_HERE / "emulated_avx512.h")),
]
EMULATED_BF16 = [*EMULATED_AVX512, "-DEMULATED_VNNI", "-DEMULATED_BF16"]


def main(arguments: list[str]) -> int:
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        print("there is no compiler; install g++ or set CXX", file=sys.stderr)
        return 1
    given = [argument for argument in arguments if argument != "--whole"]
    whole = _FILES if "--whole" in arguments else None
    with ExitStack() as stack:
        # The next build compiles while tests run.
        builds = [
            (name, stack.enter_context(Build(name, compiler, flags)))
            for name, flags in flags_of_builds(processor_features()).items()
        ]
        for name, build in builds:
            others = [] if name.startswith("with emulated") else [*OTHER_PARTS, *ONLY_NATIVE]
            if code := build.wait() or build.test(given or whole or [*KERNELS, *others]):
                return code
    return 0


def flags_of_builds(features: set[str]) -> dict[str, list[str]]:
    """Returns the builds for a processor, and their flags. Only instructions that the processor
    lacks are emulated."""
    builds = {"for this processor": FLAGS}
    if KINDS["avx512"].features <= features:
        builds["for AVX2"] = [*FLAGS, *KINDS["avx2"].flags]
    else:
        builds["with emulated AVX-512"] = [*WARNINGS, *EMULATED_AVX512]
    if "avx512_vnni" not in features:
        builds["with emulated VNNI"] = [*WARNINGS, *EMULATED_AVX512, "-DEMULATED_VNNI"]
    if "amx_int8" not in features:
        others = [] if "avx512_bf16" in features else EMULATED_BF16
        builds["with emulated tile registers"] = [*WARNINGS, *others, *EMULATED_TILES]
    return builds


class Build:
    """Native code that is compiled with `flags` in the background, for tests."""

    def __init__(self, name: str, compiler: str, flags: Sequence[str]) -> None:
        self._name, self._compiler, self._flags = name, compiler, flags
        self._folder = tempfile.TemporaryDirectory(prefix="promptq-sanitizers-")

    def __enter__(self) -> Build:
        watching = Path(self._folder.name, "c++")
        flags = shlex.join(self._flags)
        watching.write_text(f'#!/bin/sh\nexec {shlex.quote(self._compiler)} "$@" {flags}\n')
        watching.chmod(0o755)
        self._environment = {"CXX": str(watching), "XDG_CACHE_HOME": self._folder.name}
        self._started = time.monotonic()
        # Compiled first, as tests skip where there is no native code. The compiler runs without the
        # sanitizers, which would watch its memory, too.
        self._compiling = self._start("-c", BUILD)
        return self

    def __exit__(self, *_: object) -> None:
        self._compiling.wait()
        self._folder.cleanup()

    def wait(self) -> int:
        """Wait until the code is compiled. Returns the exit code."""
        return self._ended("compiled", self._compiling)

    def test(self, tests: Sequence[str]) -> int:
        """Run tests. What the sanitizers say, they say to the terminal. Returns the exit code."""
        options = ["-n", "0", "--capture=sys", "--whole", "-o", "faulthandler_timeout=0"]
        self._environment |= sanitizing(self._compiler)
        self._started = time.monotonic()
        return self._ended("tested", self._start("-m", "pytest", *options, *tests))

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self._environment}
        return subprocess.Popen([sys.executable, *words], env=environment)

    def _ended(self, done: str, process: subprocess.Popen[bytes]) -> int:
        code = process.wait()
        seconds = time.monotonic() - self._started
        outcome = f"exit code {code}" if code else done
        print(f"native code {self._name}: {outcome} after {seconds:.0f} s", flush=True)
        return code


def sanitizing(compiler: str) -> dict[str, str]:
    """Returns the environment variables of a process that loads code with sanitizers."""
    return {
        "LD_PRELOAD": " ".join(path_of(compiler, name) for name in PRELOADED),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps what it has to the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def path_of(compiler: str, library: str) -> str:
    asked = [compiler, f"-print-file-name={library}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
