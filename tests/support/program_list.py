"""The page of `python -m tests` and `python -m benchmarks`: lists programs and starts one."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Program:
    """A module that runs as a program. The page shows the first sentence of its docstring."""

    module: str
    arguments: tuple[str, ...] = ()
    """Arguments that come before those of the command line."""
    environment: Mapping[str, str] = field(default_factory=dict)
    sentence: str = ""
    """Replaces the docstring's first sentence on the page."""

    def first_sentence(self) -> str:
        """Returns the sentence for the page. Imports no module, because some import torch."""
        if self.sentence:
            return self.sentence
        text = ast.get_docstring(ast.parse(self._path().read_text())) or ""
        paragraph = " ".join(text.split("\n\n")[0].split())
        return paragraph.split(". ")[0].rstrip(".") + "."

    def start(self, arguments: list[str]) -> None:
        """Replaces this process by the program."""
        source = self._path().read_text()
        if {"-h", "--help"} & set(arguments) and "argparse" not in source:
            print(ast.get_docstring(ast.parse(source)))
            sys.exit(0)
        command = [sys.executable, "-m", self.module, *self.arguments, *arguments]
        os.execve(sys.executable, command, {**os.environ, **self.environment})  # noqa: S606

    def _path(self) -> Path:
        spec = find_spec(self.module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{self.module}.__main__")
        assert spec is not None, self.module
        assert spec.origin is not None, self.module
        return Path(spec.origin)


def run(command: str, programs: Mapping[str, Program]) -> int:
    """Start the program that the command line names, or print the page. Returns the exit code."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in programs:
        programs[name].start(arguments)
    if name not in ("-h", "--help"):
        print(f"There is no {name!r}; {command} --help lists all names.", file=sys.stderr)
        return 2
    print(f"usage: {command} NAME [--help] [ARGUMENTS]\n")
    for each, program in programs.items():
        print(f"  {each:16} {program.first_sentence()}")
    return 0
