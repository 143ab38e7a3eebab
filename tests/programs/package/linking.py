"""Fills a new environment with links to packages of this one, so that pip need not unpack them."""

from __future__ import annotations

import os
import shutil
import sysconfig
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement


def link_requirements(environment: Path, wheel: Path, extras: Iterable[str]) -> None:
    """Links the packages that the wheel requires, directly or not, and no other ones. pip still has
    to compare versions, and to install packages that are not here."""
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
