"""Finds or compiles the shared library of the native code for this machine.

Wheels have libraries for the usual kinds of processors (hatch_build.py). For other processors the
library is compiled at first use, and kept for later starts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

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
    # Fuses each product with its sum. For Zen processors, GCC would leave some unfused.
    "--param=avoid-fma-max-bits=0",
    "-fopenmp",
    # Compilers prefer half the width, because the full width slowed old processors down.
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
]
_BUILT = Path(__file__).parent / "built"
"""The folder of libraries that are part of the wheel."""


class Kind(NamedTuple):
    """A kind of processor for which there can be a library."""

    flags: list[str]  # of the compiler
    features: set[str]  # that the flags need, as Linux names them


_V3 = Kind(["-march=x86-64-v3"], {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = Kind(
    ["-march=x86-64-v4"], _V3.features | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
)
_VNNI = Kind([*_V4.flags, "-mavx512vnni"], _V4.features | {"avx512_vnni"})
_BF16 = Kind([*_VNNI.flags, "-mavx512bf16"], _VNNI.features | {"avx512_bf16"})
_AMX = Kind(
    [*_BF16.flags, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    _BF16.features | {"amx_tile", "amx_bf16", "amx_int8"},
)
KINDS = {"amx": _AMX, "avx512-bf16": _BF16, "avx512-vnni": _VNNI, "avx512": _V4, "avx2": _V3}
"""The kinds of processors for which wheels have native code, the fastest first."""


class NativeCodeError(Exception):
    """Raised if this machine cannot compile or load native code. The message has the reason."""


def library_path() -> Path:
    """Returns the path of the library for this machine. Compiles the library if the wheel has none
    for the processor. Raises NativeCodeError if the library cannot be compiled."""
    if platform.system() != "Linux":
        raise NativeCodeError(f"it is for Linux, and this is {platform.system()}")
    features = processor_features()
    for name, kind in KINDS.items():
        if kind.features <= features and (built := _BUILT / name_for(name)).exists():
            return built
    try:
        return _compiled_here()
    except OSError as error:
        reason = f"{error.filename} cannot be used ({error.strerror})"
        raise NativeCodeError(f"{reason}; set XDG_CACHE_HOME to a usable folder") from error


def _compiled_here() -> Path:
    """Returns a library compiled on this machine. Compiles it if an earlier start has not. Its name
    has hashes of the sources, flags, processor and compiler version. Without a compiler, a library
    of any compiler version is used."""
    name = f"native-{_digest_with(_processor())}"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "promptq"
    except RuntimeError:
        raise NativeCodeError("this user has no home; set XDG_CACHE_HOME to a folder") from None
    compiler = shutil.which(_compiler())
    if compiler is None:
        compiled = sorted(folder.glob(f"{name}-*.so"))
        if not compiled:
            wrong = "change CXX" if os.environ.get("CXX") else "install g++ or set CXX"
            raise NativeCodeError(f"there is no compiler {_compiler()}; {wrong}")
        return compiled[-1]
    version = subprocess.run(  # noqa: S603 # the operator's compiler
        [compiler, "--version"], capture_output=True, check=False
    )
    library = folder / f"{name}-{hashlib.sha256(version.stdout).hexdigest()[:8]}.so"
    if not library.exists():
        _compile(compiler, {library: ["-march=native"]})
    return library


def build_for(kinds: Iterable[str], folder: Path) -> list[Path]:
    """Compile a library for each of these kinds, and return the paths. Raises NativeCodeError if
    that fails."""
    compiler = shutil.which(_compiler())
    if compiler is None:
        raise NativeCodeError(f"there is no compiler {_compiler()}")
    libraries = {folder / name_for(kind): KINDS[kind].flags for kind in kinds}
    _compile(compiler, libraries)
    return [*libraries]


def name_for(kind: str) -> str:
    return f"native-{_digest_with(' '.join([kind, *KINDS[kind].flags]))}-{kind}.so"


def _digest_with(processor: str) -> str:
    """Returns a hash of the sources, the flags and the processor, but not of the compiler."""
    sources = sorted(path for path in _SOURCES.rglob("*.*") if path.suffix in (".cpp", ".h"))
    if not sources:
        raise NativeCodeError(f"its sources are missing in {_SOURCES}; install promptq anew")
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    digest.update(" ".join((*_FLAGS, processor)).encode())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


def _processor() -> str:
    """Returns a text that identifies the processor features behind `-march=native`."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))


def processor_features() -> set[str]:
    """Returns the processor's features, as Linux names them."""
    text = Path("/proc/cpuinfo").read_text()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def _compile(compiler: str, libraries: dict[Path, list[str]]) -> None:
    """Compile libraries into one folder, each with its flags. Equal object files are shared."""
    library, *_ = libraries
    logger.info("compiling native code, once for this machine, into %s", library)
    _remove_unfinished(library.parent)
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{_UNFINISHED}{os.getpid()}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=library.parent) as folder:
            commands, objects = dict[tuple[str, ...], str](), dict[Path, list[str]]()
            for library, flags in libraries.items():
                objects[library] = []
                for source in sorted(_SOURCES.glob("*.cpp")):
                    used = _used_flags(source, flags)
                    command = (compiler, *_FLAGS, *used, f"-I{_SOURCES}", "-c", str(source), "-o")
                    to = f"{folder}/{source.stem}-{len(commands)}.o"
                    objects[library].append(commands.setdefault(command, to))
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                [*threads.map(_run, [(*command, to) for command, to in commands.items()])]
            for library, flags in libraries.items():
                built = Path(folder, library.name)
                _run([compiler, *_FLAGS, *flags, "-shared", *objects[library], "-o", str(built)])
                built.rename(library)  # atomic, because two workers may build at once
    except OSError as error:
        reason = f"{library} cannot be written ({error.strerror})"
        raise NativeCodeError(f"{reason}; set XDG_CACHE_HOME to a usable folder") from error


def _used_flags(source: Path, flags: list[str]) -> list[str]:
    """Returns `flags` without the processor features that neither `source` nor its headers name."""
    texts, unread = dict[Path, str](), [source]
    while unread:
        path = unread.pop()
        if path not in texts:
            texts[path] = path.read_text()
            names = re.findall(r'^#include "(.+)"', texts[path], re.MULTILINE)
            unread += [_SOURCES / name for name in names]
    text = "".join(texts.values())
    features = {flag: flag.removeprefix("-m").partition("-")[0].upper() for flag in flags}
    return [flag for flag in flags if flag.startswith("-march") or f"__{features[flag]}" in text]


def _remove_unfinished(folder: Path) -> None:
    """Remove files of compilations that never finished, because their process ended."""
    for left in folder.glob(f"{_UNFINISHED}*"):
        pid = left.name.removeprefix(_UNFINISHED).partition("-")[0]
        if not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)


def _run(command: Sequence[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        lines = ended.stderr.splitlines()
        first = next((line for line in lines if "error" in line), ended.stderr)
        raise NativeCodeError(f"{_compiler()} failed: {first.strip()}")
