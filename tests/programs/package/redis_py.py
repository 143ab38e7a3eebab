"""Runs the client on old and new versions of redis-py.

Arguments such as `5.2.1 6.4.0` choose versions; without arguments, the program runs on all
supported versions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.programs.package.building import ROOT, build

VERSIONS = ["5.2.1", "5.3.1", "6.0.0", "6.4.0", "7.0.1", "7.4.1", "8.1.0"]
"""kombu 5.5 allows versions up to 5.2.1, kombu 5.6 versions below 6.5."""

TESTS = [
    *(f"tests/producer/clients/test_{name}.py" for name in ("clients", "stream", "subscriptions")),
    *(f"tests/shared/server/test_{name}.py" for name in ("connection", "sentinel")),
]
TOOLS = ["fakeredis[lua]", "pytest", "pytest-asyncio", "pytest-xdist"]


def check(wheel: Path, version: str) -> str:
    """Returns the failures on this version of redis-py as text; empty if there are none."""
    with tempfile.TemporaryDirectory(prefix=f"promptq-redis-py-{version}-") as folder:
        python, constraints = f"{folder}/venv/bin/python", Path(folder, "constraints.txt")
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        kept = [line for line in lines if not line.startswith("redis==")]
        constraints.write_text("\n".join([*kept, f"redis=={version}"]))
        install = ["-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
        said = ""
        for command in (
            [sys.executable, "-m", "venv", "--without-pip", f"{folder}/venv"],
            [sys.executable, *install, "--constraint", constraints, f"{wheel}[server]", *TOOLS],
            [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *TESTS],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            said = done.stdout + done.stderr
            if done.returncode:
                return said
        print(f"redis-py {version}: {said.splitlines()[-1]}", flush=True)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests redis-py", description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of building one")
    options = parser.parse_args()
    versions: list[str] = options.versions
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        wheel = options.wheel or build(Path(folder))
        failures = dict(zip(versions, pool.map(partial(check, wheel), versions), strict=True))
    failed = {version: said for version, said in failures.items() if said}
    for version, said in failed.items():
        print(f"redis-py {version}:\n{said}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
