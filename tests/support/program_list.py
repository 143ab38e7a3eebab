"""The page of `python -m tests` and `python -m benchmarks`: lists programs and starts one of
them."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
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

    def run(self, arguments: list[str]) -> int:
        """Run the program, and pass signals on to it. Returns the exit code. If a signal killed the
        program, prints the signal's name, because a killed program prints nothing itself."""
        source = self._path().read_text()
        if {"-h", "--help"} & set(arguments) and "argparse" not in source:
            print(ast.get_docstring(ast.parse(source)))
            return 0
        command = [sys.executable, "-m", self.module, *self.arguments, *arguments]
        process: subprocess.Popen[bytes] | None = None

        def pass_on(number: int, _: object) -> None:
            if process is not None:
                process.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, pass_on)
        process = subprocess.Popen(command, env={**os.environ, **self.environment})
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the program as well
        code = process.wait()
        if code < 0:
            print(f"{self.module} was killed by {signal.Signals(-code).name}", file=sys.stderr)
        return code if code >= 0 else 128 - code

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
        return programs[name].run(arguments)
    if name not in ("-h", "--help"):
        print(f"There is no {name!r}; {command} --help lists all names.", file=sys.stderr)
        return 2
    print(f"usage: {command} NAME [--help] [ARGUMENTS]\n")
    for each, program in programs.items():
        print(f"  {each:16} {program.first_sentence()}")
    return 0
