"""`make requirements`: writes what the images install, as a line with hashes for each package.

The input is the lock file of `uv pip compile`: only wheels, for the images' Python and Linux. What
torch needs for CUDA alone goes into a file that reads the other one.
"""

import sys
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
NAME, NAME_CUDA = "requirements.txt", "requirements.cuda.txt"
ONLY_CUDA = ("nvidia-", "cuda-", "triton")
HEADER = "# Written by `make requirements` from constraints.txt, for Python 3.11 on x86-64.\n"


def main() -> None:
    packages = tomllib.loads(Path(sys.argv[1]).read_text())["packages"]
    lines: dict[bool, list[str]] = {False: [HEADER], True: [HEADER, f"--requirement {NAME}\n"]}
    for package in packages:
        hashes = sorted(wheel["hashes"]["sha256"] for wheel in package["wheels"])
        pinned = [
            f"{package['name']}=={package['version']}",
            *(f"--hash=sha256:{it}" for it in hashes),
        ]
        lines[package["name"].startswith(ONLY_CUDA)].append(" ".join(pinned) + "\n")
    (FOLDER / NAME).write_text("".join(lines[False]))
    (FOLDER / NAME_CUDA).write_text("".join(lines[True]))


main()
