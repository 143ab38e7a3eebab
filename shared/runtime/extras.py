"""Optional dependencies (extras): the packages of each, and whether they are installed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires

from promptq.shared.errors import ConfigurationError

_REQUIREMENT = re.compile(
    r"""(?P<name>[\w.-]+)(\[(?P<extras>[\w,\s.-]+)\])?   # a distribution, with its extras
        [^;]*(;.*\bextra\s*==\s*["'](?P<of>[\w.-]+)["'])?""",
    re.VERBOSE,
)

_IS_ELSEWHERE = re.compile("sys_platform|python_version")
"""Matches the condition of a package that only some systems or Python versions need."""


def require(what: str, *extras: str) -> None:
    """Raises ConfigurationError unless all packages of these extras are installed.

    `what`, in the message, names the part that needs the extras. If promptq was not installed as a
    package, its extras are unknown, and a missing package causes an ImportError later.
    """
    if missing := [extra for extra in extras if not _is_complete(extra)]:
        raise _lacks(what, missing)


def require_one_of(what: str, *extras: str) -> None:
    """Raises ConfigurationError unless at least one of these extras is completely installed."""
    if not any(map(_is_complete, extras)):
        raise _lacks(what, extras[:1])


def how_to_install(*extras: str) -> str:
    """Returns the command that installs extras.

    The command installs the wheel that `make wheel` builds. No package index has promptq, so
    anybody could register the name there, and pip would run their code.
    """
    return f'pip install "$(echo dist/promptq-*.whl)[{",".join(extras)}]" where `make wheel` ran'


def _lacks(what: str, extras: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{what} needs packages that are not installed: {how_to_install(*extras)}"
    )


def _is_complete(extra: str) -> bool:
    return all(map(_is_installed, _needs(extra)))


def _needs(extra: str) -> Iterator[str]:
    try:
        requirements = requires("promptq") or []
    except PackageNotFoundError:
        return
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is None or match["of"] != extra or _IS_ELSEWHERE.search(requirement):
            continue
        if match["name"] == "promptq":
            for other in (match["extras"] or "").split(","):
                yield from _needs(other.strip())
        else:
            yield match["name"]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
