"""Writes the requirements of the images, with hashes: `python deploy/images/lock.py`. Needs uv.

uv resolves the versions of constraints.txt: only wheels, for the images' Python and Linux. What
torch needs for CUDA alone goes into a file that reads the other one.
"""

import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
COMPILE = (
    "uv pip compile pyproject.toml --quiet --extra all --constraint constraints.txt"
    " --python-version 3.11.2 --python-platform x86_64-manylinux_2_36 --only-binary :all:"
)
NAME, NAME_CUDA = "requirements.txt", "requirements.cuda.txt"
ONLY_CUDA = ("nvidia-", "cuda-", "triton")
HEADER = "# Written by deploy/images/lock.py from constraints.txt, for Python 3.11 on x86-64.\n"


def main() -> None:
    lines: dict[bool, list[str]] = {False: [HEADER], True: [HEADER, f"--requirement {NAME}\n"]}
    for package in resolved_packages():
        hashes = sorted(wheel["hashes"]["sha256"] for wheel in package["wheels"])
        pinned = [
            f"{package['name']}=={package['version']}",
            *(f"--hash=sha256:{digest}" for digest in hashes),
        ]
        lines[package["name"].startswith(ONLY_CUDA)].append(" ".join(pinned) + "\n")
    (FOLDER / NAME).write_text("".join(lines[False]))
    (FOLDER / NAME_CUDA).write_text("".join(lines[True]))


def resolved_packages() -> list[dict[str, Any]]:
    """Returns the entries of uv's lock file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pylock.toml"
        subprocess.run(  # noqa: S603 - all of it is written here
            [*COMPILE.split(), "--output-file", file], cwd=ROOT, check=True
        )
        packages: list[dict[str, Any]] = tomllib.loads(file.read_text())["packages"]
        return packages


main()
