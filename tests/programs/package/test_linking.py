"""An environment of links has the packages that a wheel requires, and no other ones."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.programs.package.building import link_requirements

METADATA = """Metadata-Version: 2.1
Name: made-up
Version: 1
Requires-Dist: redis
Requires-Dist: made_up[shown]; extra == "all"
Requires-Dist: rich; extra == "shown"
Requires-Dist: fakeredis; extra == "tested"
Requires-Dist: not-installed-here; extra == "all"
"""
NAMES = (
    "import importlib.metadata as m; print(*(each.metadata['Name'] for each in m.distributions()))"
)


def test_required_packages_are_linked(tmp_path: Path) -> None:
    wheel = tmp_path / "made_up-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("made_up-1.dist-info/METADATA", METADATA)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"

    def run(code: str) -> str:
        return subprocess.run(
            [python, "-P", "-c", code], capture_output=True, text=True, check=True
        ).stdout

    link_requirements(environment, wheel, [])
    assert {"redis"} <= set(run(NAMES).split()) <= {"redis", "async-timeout"}
    link_requirements(environment, wheel, ["all"])
    found = {name.lower() for name in run(NAMES).split()} - {"async-timeout"}
    assert found == {"redis", "rich", "markdown-it-py", "mdurl", "pygments"}
    assert run("import redis, rich.markdown; print('imported')") == "imported\n"
