"""Compiles the native code at first use and loads it. The result is kept for later starts.

`python -m promptq.worker.engine.native.build x86-64-v3 x86-64-v4 sapphirerapids` compiles it beside
its sources, for processors other than this one. Images have no compiler and are built like that.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "src"
_UNFINISHED = "building-"
_FLAGS = [
    "-fPIC",
    "-std=c++20",
    "-O3",
    "-ffast-math",
    "-fno-finite-math-only",
    "-fno-associative-math",  # sums keep the order of the source, for any number of rows
    # And each product is fused with its sum: for Zen processors GCC leaves some of them apart.
    "--param=avoid-fma-max-bits=0",
    "-fopenmp",
    "-DAT_PARALLEL_OPENMP=1",
    # Compilers prefer half the width, because the full width slowed old processors down.
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
]
_BUILT = Path(__file__).parent / "built"
"""Libraries that were compiled for kinds of processors."""
_V3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_SAPPHIRE_RAPIDS = _V4 | {
    *("amx_tile", "amx_bf16", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512vbmi"),
    *("avx512_vbmi2", "avx512_bitalg", "avx512_vpopcntdq", "avx_vnni", "gfni", "vaes"),
}
KINDS = {"sapphirerapids": _SAPPHIRE_RAPIDS, "x86-64-v4": _V4, "x86-64-v3": _V3}
"""Kinds of processors as GCC names them, the fastest first, and the features that each has."""


class NativeCodeError(Exception):
    """There can be no native code on this machine. The message says why."""


@cache
def load_native() -> None:
    """Register the code in `src` in `torch.classes.promptq` and `torch.ops.promptq`.

    It is compiled first if that was not done before. Raises NativeCodeError if this is impossible.
    """
    if platform.system() != "Linux":
        raise NativeCodeError(f"it is for Linux, and this is {platform.system()}")
    backends: Any = torch.backends
    if not backends.mkldnn.is_available():
        raise NativeCodeError("this torch is built without oneDNN")
    try:
        library = _library()
    except OSError as error:
        reason = f"{error.filename} cannot be used ({error.strerror})"
        raise NativeCodeError(f"{reason}; set XDG_CACHE_HOME to a usable folder") from error
    ops: Any = torch.ops
    try:
        ops.load_library(str(library))
    except OSError as error:
        raise NativeCodeError(f"{library} does not load: {error}") from error
    ops.promptq.keep_freed_memory()


def _library() -> Path:
    """The compiled library. Its name has hashes of all that it depends on: sources, flags, torch
    and processor, then the compiler. Without a compiler, a library of any compiler is used, or one
    that was compiled for processors of this kind.
    """
    name = f"native-{_digest_with(_processor())}"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "promptq"
    except RuntimeError:
        raise NativeCodeError("this user has no home; set XDG_CACHE_HOME to a folder") from None
    compiler = shutil.which(_compiler())
    if compiler is None:
        made = sorted(folder.glob(f"{name}-*.so")) or _built_for(_features())
        if not made:
            wrong = "change CXX" if os.environ.get("CXX") else "install g++ or set CXX"
            raise NativeCodeError(f"there is no compiler {_compiler()}; {wrong}")
        return made[-1]
    library = folder / f"{name}-{_version_of(compiler)}.so"
    if not library.exists():
        _compile(compiler, library, "native")
    return library


def build_for(kinds: Sequence[str]) -> list[Path]:
    """Compile the library for kinds of processors, beside its sources. Raises NativeCodeError."""
    compiler = shutil.which(_compiler())
    if compiler is None:
        raise NativeCodeError(f"there is no compiler {_compiler()}")
    for unknown in set(kinds) - KINDS.keys():
        raise NativeCodeError(f"{unknown!r} is none of {', '.join(KINDS)}")
    for kind in kinds:
        _compile(compiler, _path_for(kind), kind)
    return [_path_for(kind) for kind in kinds]


def _built_for(features: set[str]) -> list[Path]:
    """The libraries here that a processor with these features can run, the fastest last."""
    kinds = [kind for kind, needed in reversed(KINDS.items()) if needed <= features]
    return [path for path in map(_path_for, kinds) if path.exists()]


def _path_for(kind: str) -> Path:
    return _BUILT / f"native-{_digest_with(kind)}-{kind}.so"


def _digest_with(processor: str) -> str:
    """A hash of all but the compiler that a library for this processor depends on."""
    sources = sorted(path for path in _SOURCES.rglob("*.*") if path.suffix in (".cpp", ".h"))
    if not sources:
        raise NativeCodeError(f"its sources are missing in {_SOURCES}; install promptq anew")
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    digest.update(" ".join((*_FLAGS, torch.__version__, processor)).encode())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


def _version_of(compiler: str) -> str:
    told = subprocess.run(  # noqa: S603 # the operator's compiler
        [compiler, "--version"], capture_output=True, check=False
    )
    return hashlib.sha256(told.stdout).hexdigest()[:8]


def _processor() -> str:
    """The processor features that `-march=native` depends on."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))


def _features() -> set[str]:
    """The processor's features, as the kernel names them."""
    text = Path("/proc/cpuinfo").read_text()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def _compile(compiler: str, library: Path, march: str) -> None:
    logger.info("compiling native code, once for this machine, into %s", library)
    _remove_unfinished(library.parent)
    home = Path(torch.__file__).parent
    include, lib = home / "include", home / "lib"
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{_UNFINISHED}{os.getpid()}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=library.parent) as folder:
            sources = sorted(_SOURCES.glob("*.cpp"))
            objects = [Path(folder, source.stem + ".o") for source in sources]
            settings = [
                *_FLAGS,
                f"-march={march}",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                f"-I{_SOURCES}",
                f"-isystem{include}",  # without warnings about these headers
                f"-isystem{include / 'torch/csrc/api/include'}",
            ]
            _run(
                [compiler, *settings, "-c", str(source), "-o", str(built)]
                for source, built in zip(sources, objects, strict=True)
            )
            built = Path(folder, library.name)
            linked = [*map(str, objects), f"-L{lib}", "-lc10", "-ltorch_cpu", "-ltorch"]
            _run([[compiler, *settings, "-shared", *linked, "-o", str(built)]])
            built.rename(library)  # atomic, because two workers may build at once
    except OSError as error:
        reason = f"{library} cannot be written ({error.strerror})"
        raise NativeCodeError(f"{reason}; set XDG_CACHE_HOME to a usable folder") from error


def _remove_unfinished(folder: Path) -> None:
    """Remove the files of processes that ended while they compiled."""
    for left in folder.glob(f"{_UNFINISHED}*"):
        pid = left.name.removeprefix(_UNFINISHED).partition("-")[0]
        if not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)


def _run(commands: Iterable[list[str]]) -> None:
    """Run all commands at once. Raises NativeCodeError if one of them fails."""
    running = [
        subprocess.Popen(  # noqa: S603 # the compiler, with arguments from here
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    messages = [process.communicate()[1] for process in running]
    for process, message in zip(running, messages, strict=True):
        if process.returncode:
            first = next((line for line in message.splitlines() if "error" in line), message)
            raise NativeCodeError(f"{_compiler()} failed: {first.strip()}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    for path in build_for(sys.argv[1:] or [*KINDS]):
        print(path)
