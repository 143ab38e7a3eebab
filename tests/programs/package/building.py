"""Builds the wheel by way of the sdist, looks into it, and installs it into a clean environment."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from promptq.worker.engine.native.build import KINDS, name_for
from tests.support.paths import ROOT

FOLDERS = ("producer", "worker", "shared")


def build(folder: Path) -> Path:
    """The wheel, made of the sdist, which is made of the checkout."""
    command = ["make", "-C", str(ROOT), "wheel", f"DIST={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """All that the checkout's folders hold is in it, native code for each kind of processor, and
    nothing else."""
    listed = ["git", "-C", str(ROOT), "ls-files", *FOLDERS]
    tracked = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    expected = {f"promptq/{path}" for path in tracked} | {"promptq/__init__.py", "promptq/py.typed"}
    expected |= {f"promptq/worker/engine/native/built/{name_for(kind)}" for kind in KINDS}
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name and name[-1] != "/"}
    assert held == expected, f"missing: {expected - held}, too much: {held - expected}"
    print(f"{wheel.name}: {len(held)} files, as in the checkout")


def install(folder: Path, wheel: Path, *extras: str, newest: bool) -> Path:
    """The interpreter of a new environment that has the wheel with these extras."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    chosen = [wanted, _tested_torch()] if "all" in extras and newest else [wanted]
    constraints = [] if newest else ["--constraint", str(ROOT / "constraints.txt")]
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-compile"]
    subprocess.run([*install, *constraints, *chosen], check=True)
    subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)
    return python


def _tested_torch() -> str:
    """The newest one would bring gigabytes of CUDA along."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))
