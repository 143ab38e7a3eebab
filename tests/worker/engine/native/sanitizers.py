"""Tests the native code built with the address and undefined-behaviour sanitizers.

The address sanitizer ends a run at the first read or write outside an object, the other one at the
first operation whose result C++ leaves undefined. Each warning of the compiler is an error here.
The tests run a second time on the code for AVX2 alone. Instructions that a processor lacks are
emulated (emulated_avx512.h, emulated_tiles.h), but then without sanitizers, because GCC 12 makes
code from both together that does not run. Matrices of tests are sampled; with `--whole` all of
them run, which takes hours. Other arguments are passed to pytest and replace the tests.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from promptq.worker.engine.native.build import KINDS, processor_features

TESTS = [
    "tests/worker/engine/native/test_native.py",
    "tests/worker/engine/native/test_native_attention.py",
    "tests/worker/engine/native/test_native_experts.py",
    "tests/worker/engine/quantization/test_quantization.py",
    "tests/worker/engine/sampling/test_sampler.py",
]

BUILD = "from promptq.worker.engine.native.library import load_native; load_native()"

WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-maybe-uninitialized",  # which GCC 12 says of its own intrinsics
]
FLAGS = [
    *WARNINGS,
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
EMULATED = {
    "AVX-512": EMULATED_AVX512,
    "VNNI": [*EMULATED_AVX512, "-DEMULATED_VNNI"],
    "tile registers": [
        *(*EMULATED_AVX512, "-DEMULATED_VNNI", "-DEMULATED_BF16"),
        *EMULATED_TILES,
    ],
}
"""Instructions that a processor with AVX2 lacks, and flags that emulate them."""
QUICK = ["-k", "products or plain_attention or int8 or near_those or experts"]
"""Tests that take minutes and not hours with it."""


def main(arguments: list[str]) -> int:
    whole = ["--whole"] if "--whole" in arguments else []
    tests = [argument for argument in arguments if argument != "--whole"]
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        print("there is no compiler; install g++ or set CXX", file=sys.stderr)
        return 1
    features = processor_features()
    builds = {"for this processor": FLAGS}
    if KINDS["avx512"].features <= features:
        builds["for AVX2"] = [*FLAGS, *KINDS["avx2"].flags]
    if "avx512_bf16" not in features:
        for name, flags in EMULATED.items():
            builds[f"with emulated {name}"] = [*WARNINGS, *flags]
    elif "amx_int8" not in features:
        builds["with emulated tile registers"] = [*WARNINGS, *EMULATED_TILES]
    for name, flags in builds.items():
        print(f"native code {name}", flush=True)
        quick = QUICK if "emulated" in name else []
        if code := run(compiler, flags, [*whole, *(tests or [*TESTS, *quick])]):
            return code
    return 0


def run(compiler: str, flags: list[str], arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="promptq-sanitizers-") as folder:
        watching = Path(folder, "c++")
        watching.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" {shlex.join(flags)}\n')
        watching.chmod(0o755)
        environment = {
            **os.environ,
            "CXX": str(watching),
            "XDG_CACHE_HOME": folder,
            "LD_PRELOAD": " ".join(path_of(compiler, name) for name in PRELOADED),
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps what it has to the end
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        # Compiled first, as tests skip where there is no native code. What the sanitizers say, they
        # say to the terminal.
        for words in (
            ["-c", BUILD],
            ["-m", "pytest", "-n", "0", "--capture=sys", *arguments],
        ):
            code = subprocess.run([sys.executable, *words], env=environment, check=False).returncode
            if code:
                return code
        return 0


def path_of(compiler: str, library: str) -> str:
    asked = [compiler, f"-print-file-name={library}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
