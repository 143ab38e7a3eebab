"""Installs the wheel in an empty folder and uses all of it.

`--newest` takes the newest versions of all packages but torch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.programs.package import building, strangers


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests package", description=__doc__)
    parser.add_argument("--newest", action="store_true", help="not the versions of constraints.txt")
    parser.add_argument("--wheel", type=Path, help="one that is built already")
    options = parser.parse_args()
    newest = options.newest
    with tempfile.TemporaryDirectory(prefix="promptq-package-") as name:
        folder = Path(name)
        wheel = options.wheel or building.build(folder / "dist")
        building.check_contents(wheel)
        strangers.check_client(building.install(folder / "client", wheel, newest=newest), folder)
        python = building.install(folder / "all", wheel, "all", newest=newest)
        strangers.check_everything(python, folder)
    print("the package works as it is installed")


if __name__ == "__main__":
    main()
