"""Builds the wheel from the sdist, checks its contents, and installs the wheel in a clean
environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement

from promptq.worker.engine.native.build import KINDS, name_for
from tests.support.paths import ROOT

FOLDERS = ("producer", "worker", "shared")


def build(folder: Path) -> Path:
    """Builds the sdist from the checkout, and the wheel from the sdist. Returns the wheel."""
    command = ["make", "-C", str(ROOT), "wheel", f"DIST={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Checks that the wheel has all files of the checkout's folders, native code for each kind of
    processor, and nothing else."""
    listed = ["git", "-C", str(ROOT), "ls-files", *FOLDERS]
    tracked = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    expected = {f"promptq/{path}" for path in tracked} | {"promptq/__init__.py", "promptq/py.typed"}
    expected |= {f"promptq/worker/engine/native/built/{name_for(kind)}" for kind in KINDS}
    with zipfile.ZipFile(wheel) as file:
        files = [name for name in file.namelist() if name[-1] != "/"]
        held = {name for name in files if not name.partition("/")[0].endswith(".dist-info")}
    assert held == expected, f"missing: {expected - held}, too much: {held - expected}"
    print(f"{wheel.name}: {len(held)} files, as in the checkout")


def install(folder: Path, wheel: Path, *extras: str, newest: bool) -> Path:
    """Returns the interpreter of a new environment that has the wheel with these extras. Without
    `newest`, packages that are installed here are linked and not installed again."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    if not newest:
        link_requirements(folder, wheel, extras)
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    chosen = [wanted, _tested_torch()] if "all" in extras and newest else [wanted]
    constraints = [] if newest else ["--constraint", str(ROOT / "constraints.txt")]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-compile"]
    subprocess.run([*install, *constraints, *chosen], check=True)
    subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)
    return python


def _tested_torch() -> str:
    """Returns the tested version. The newest one would install gigabytes of CUDA."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def link_requirements(environment: Path, wheel: Path, extras: Iterable[str]) -> None:
    """Link the packages that the wheel requires, directly or not, and no other ones. pip still
    compares versions, and installs packages that are not here."""
    folder = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    own_name = wheel.name.partition("-")[0]
    todo, seen = [(own_name, frozenset(extras))], set[tuple[str, frozenset[str]]]()
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        if name == own_name:
            requirements = _requirements_of(wheel)
        else:
            try:
                package = distribution(name)
            except PackageNotFoundError:
                continue
            _link(package, folder)
            requirements = package.requires or []
        todo += [
            (each.name, frozenset(each.extras))
            for each in map(Requirement, requirements)
            if each.marker is None
            or any(each.marker.evaluate({"extra": extra}) for extra in wanted or {""})
        ]


def _requirements_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        name = min(names, key=len)  # a plugin in the wheel has another one
        return message_from_bytes(file.read(name)).get_all("Requires-Dist", [])


def _link(package: Distribution, folder: Path) -> None:
    """Links a package's files and their bytecode, but not its commands."""
    for file in package.files or ():
        if ".." in file.parts:
            continue
        source = Path(str(file.locate()))
        target = folder / file
        _link_file(source, target)
        if source.suffix == ".py":
            _link_file(Path(cache_from_source(source)), Path(cache_from_source(target)))


def _link_file(source: Path, target: Path) -> None:
    if target.exists() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # such as another disk
        shutil.copy2(source, target)
