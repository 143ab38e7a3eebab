"""The files that images are made of; `python -m tests images` builds one and serves with it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

IMAGES = ROOT / "deploy" / "images"
FILES = sorted(IMAGES.glob("Containerfile*"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_has_nothing_to_say_of_a_containerfile(file: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    read = subprocess.run([hadolint, file], capture_output=True, text=True, check=False)
    assert (read.stdout, read.stderr, read.returncode) == ("", "", 0)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_image_runs_as_nobody_and_hears_that_it_is_to_stop(file: Path) -> None:
    last = file.read_text().rpartition("\nFROM ")[2]
    assert re.search(r"^USER (\d+):\1$", last, re.MULTILINE)
    assert 'ENTRYPOINT ["promptq"]' in last  # no shell in between, which would keep SIGTERM
    assert "STOPSIGNAL SIGTERM" in last


def pinned(file: Path) -> dict[str, str]:
    """The version of each package of a file of requirements or constraints."""
    lines = [line.partition(" ")[0] for line in file.read_text().splitlines() if "==" in line]
    versions = dict(line.split("==") for line in lines)
    return {canonicalize_name(name): version for name, version in versions.items()}


def test_images_install_what_is_tested_and_know_its_hashes() -> None:
    """`deploy/images/lock.py` writes the files."""
    tested = pinned(ROOT / "constraints.txt")
    installed = pinned(IMAGES / "requirements.txt")
    differing = {it for it in installed.keys() & tested.keys() if installed[it] != tested[it]}
    assert differing == set()
    of_cuda = pinned(IMAGES / "requirements.cuda.txt")
    assert of_cuda.keys().isdisjoint(installed)
    assert of_cuda["triton"] == tested["triton"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    [everything] = map(Requirement, optional["all"])
    groups = [project["dependencies"], *(optional[extra] for extra in everything.extras)]
    needed = {canonicalize_name(Requirement(it).name) for group in groups for it in group}
    assert needed - installed.keys() == {"promptq"}
    for file in IMAGES.glob("requirements*.txt"):
        for line in file.read_text().splitlines():
            assert re.fullmatch(
                r"#.*|--requirement \S+|\S+==\S+( --hash=sha256:[0-9a-f]{64})+", line
            ), line


def test_an_image_lists_all_packages_that_it_has() -> None:
    printed = subprocess.check_output([sys.executable, IMAGES / "sbom.py"], text=True)
    listed = json.loads(printed)
    assert (listed["bomFormat"], listed["specVersion"]) == ("CycloneDX", "1.6")
    references = [it["bom-ref"] for it in listed["components"]]
    assert len(set(references)) == len(references)
    versions = {it["purl"].partition("@")[0]: it["version"] for it in listed["components"]}
    # In this process setuptools may have put its own copies on the path.
    for each in distributions(path=[place for place in sys.path if "_vendor" not in place]):
        assert f"pkg:pypi/{canonicalize_name(each.name)}" in versions
    assert versions["pkg:generic/python"] == ".".join(map(str, sys.version_info[:3]))
    assert ("pkg:deb/debian/libc6" in versions) == (shutil.which("dpkg-query") is not None)
