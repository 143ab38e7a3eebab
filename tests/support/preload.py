"""Compiles libraries in C that tests load into servers (LD_PRELOAD)."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import run


def compile_preload(source: Path, folder: Path) -> Path:
    """Returns the path of the library, which is compiled once for each folder. Raises RuntimeError
    if gcc cannot compile the source."""
    library = folder / f"{source.stem}.so"
    if not library.exists():
        new = library.with_suffix(".new")
        built = run("gcc", "-shared", "-fPIC", "-O2", "-Wall", "-o", new, source, "-ldl")
        if built.returncode:
            raise RuntimeError(f"gcc cannot compile {source}: {built.stderr}")
        new.rename(library)
    return library
