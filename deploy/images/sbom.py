"""Prints a CycloneDX list of what an image has: Python, its packages, and Debian's.

The image's own Python runs this when the image is built.
"""

import json
import platform
import re
import shutil
import subprocess
from importlib.metadata import distributions
from typing import Any
from urllib.parse import quote


def component(name: str, version: str, purl: str, license_expression: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {"type": "library", "name": name, "version": version}
    if license_expression:
        fields["licenses"] = [{"expression": license_expression}]
    return {**fields, "bom-ref": purl, "purl": purl}


def python_packages() -> list[dict[str, Any]]:
    components = {}
    for package in distributions():
        name = re.sub(r"[-_.]+", "-", package.name).lower()
        purl = f"pkg:pypi/{name}@{quote(package.version)}"
        license_expression = package.metadata.get("License-Expression", "")
        components[purl] = component(name, package.version, purl, license_expression)
    return [components[purl] for purl in sorted(components)]


def debian_packages() -> list[dict[str, Any]]:
    if shutil.which("dpkg-query") is None:
        return []
    form = "${binary:Package} ${Version} ${Architecture}\n"
    query = ["dpkg-query", "--show", "--showformat", form]
    done = subprocess.run(query, capture_output=True, text=True, check=True)  # noqa: S603 - a fixed command
    components = []
    for line in done.stdout.splitlines():
        name, version, architecture = line.split()
        name = name.partition(":")[0]
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}"
        components.append(component(name, version, purl))
    return components


def main() -> None:
    version = platform.python_version()
    python = component("python", version, f"pkg:generic/python@{quote(version)}")
    everything = [python, *python_packages(), *debian_packages()]
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    print(json.dumps({**head, "components": everything}, indent=1))


if __name__ == "__main__":
    main()
