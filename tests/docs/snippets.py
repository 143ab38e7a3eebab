"""Runs the shell and Python snippets of a page as a reader would paste them.

The argument is the page, such as `README.md`.

The snippets of a page share an empty folder, an empty HOME, one shell and one Python interpreter.
They have no network but loopback. `make` only checks that its target exists. A comment above a
snippet says how to run it:

    <!-- not run: REASON -->
    <!-- stays open until it prints: TEXT, TEXT -->     in a terminal beside the others
    <!-- stays open alone until it prints: TEXT -->     after Ctrl-C in those
    <!-- run beside: COMMAND, until it prints: TEXT -->  for the whole page, at its top
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple

from tests.programs.compat.environments import leave_network
from tests.support.paths import ROOT
from tests.support.processes import kill_all, start

FENCE = re.compile(
    r"^(?:<!-- (?P<comment>[^\n]*) -->\n)?```(?P<language>sh|python)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
BESIDE = re.compile(r"^<!-- run beside: (.*), until it prints: (.*) -->$", re.MULTILINE)
STAYS_OPEN = re.compile(r"stays open (alone )?until it prints: (.*)")
NOT_RUN = re.compile(r"not run: (.*)")
FAILED = re.compile(r'Traceback|"error": ?\{|^\(error\)|^(?:ERR|WRONGTYPE|NOAUTH) ', re.MULTILINE)
"""Signs of a failure in the output of programs that exit with 0, such as curl and redis-cli."""

_DONE = "--- snippet done ---"
_INTERPRETER = f"""
import json, sys
names = {{"__name__": "__main__"}}
for line in sys.stdin:
    exec(compile(*json.loads(line), "exec"), names)
    print({_DONE!r}, flush=True)
"""


class Snippet(NamedTuple):
    line: int
    """Where its code begins in the page."""
    comment: str
    language: str
    code: str


def snippets_of(page: str) -> list[Snippet]:
    return [
        Snippet(
            page.count("\n", 0, match.start("code")) + 1,
            match["comment"] or "",
            match["language"],
            match["code"],
        )
        for match in FENCE.finditer(page)
    ]


class SnippetError(AssertionError):
    """A snippet that does not do what a reader expects."""


class Session:
    """A shell or an interpreter that runs one snippet after the other."""

    def __init__(self, *command: str) -> None:
        self.process = start(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, line: str) -> str:
        """Returns the output of a line of input. Raises SnippetError if it failed."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        shown, ended = read_until(self.process.stdout, [_DONE])
        shown = shown.replace(f"{_DONE}\n", "")
        if not ended or FAILED.search(shown):
            raise SnippetError(shown)
        return shown


class Shell(Session):
    """A shell, and terminals beside it that know its functions and variables."""

    def __init__(self) -> None:
        super().__init__("bash", "-e")
        self._terminals: list[tuple[int, IO[str]]] = []
        self._folder = Path(os.environ["HOME"])

    def run_code(self, code: str) -> str:
        return self.run(f"source {self._script(code)} </dev/null; echo '{_DONE}'")

    def open_terminal(self, code: str, texts: str) -> None:
        """Run code that does not end, until it has printed all the texts."""
        output = self._folder / f"terminal-{len(self._terminals)}"
        os.mkfifo(output)
        # With a process group for each job, which Ctrl-C then reaches as at a terminal.
        job = f"source {self._script(code)} </dev/null >{output} 2>&1 &"
        pid = int(self.run(f"set -m; {job} echo $!; set +m; echo '{_DONE}'"))
        stream = output.open()
        output.unlink()
        self._terminals.append((pid, stream))
        shown, ready = read_until(stream, texts.split(", "))
        if not ready:
            raise SnippetError(shown)

    def press_ctrl_c(self) -> None:
        for pid, output in self._terminals:
            with suppress(ProcessLookupError):  # such as one that read from a server of another
                os.killpg(pid, signal.SIGINT)
            with output:
                output.read()
        self._terminals.clear()

    def close(self) -> None:
        kill_all(self.process.pid)
        for pid, output in self._terminals:  # a shell that has failed is no longer their parent
            kill_all(pid)
            output.close()

    def _script(self, code: str) -> Path:
        script = self._folder / "snippet.sh"
        script.unlink(missing_ok=True)  # a terminal may still read the last one
        script.write_text(code)
        return script


def read_until(output: IO[str] | None, texts: list[str]) -> tuple[str, bool]:
    """Returns what was read, and whether all the texts came before the end."""
    assert output is not None
    shown = ""
    while not all(text in shown for text in texts):
        line = output.readline()
        if not line:
            return shown, False
        shown += line
    return shown, True


def run_page(path: Path) -> Iterator[tuple[Snippet, str]]:
    """Run the page's snippets; yields each with its output. Raises SnippetError."""
    page = path.read_text()
    with reader(), ExitStack() as stack:
        shell = Shell()
        stack.callback(shell.close)
        interpreter = Session(sys.executable, "-c", _INTERPRETER)
        stack.callback(kill_all, interpreter.process.pid)
        if beside := BESIDE.search(page):
            shell.open_terminal(beside[1], beside[2])
        for snippet in snippets_of(page):
            try:
                if NOT_RUN.fullmatch(snippet.comment):
                    continue
                if terminal := STAYS_OPEN.fullmatch(snippet.comment):
                    if terminal[1]:
                        shell.press_ctrl_c()
                    shell.open_terminal(snippet.code, terminal[2])
                elif snippet.language == "sh":
                    yield snippet, shell.run_code(snippet.code)
                else:
                    yield snippet, interpreter.run(json.dumps([snippet.code, "snippet"]))
            except SnippetError as error:
                raise SnippetError(f"{path}:{snippet.line}:\n{snippet.code}\n{error}") from None


@contextmanager
def reader() -> Iterator[None]:
    """A reader's environment: this installation, an empty HOME and an empty folder."""
    with TemporaryDirectory() as name:
        home, folder, programs = (Path(name, each) for each in ("home", "folder", "bin"))
        for each in (home, folder, programs):
            each.mkdir()
        (programs / "make").write_text(f'#!/bin/sh\nexec /usr/bin/make -n -C {ROOT} "$@"\n')
        (programs / "make").chmod(0o755)
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
        # Native code is compiled once for a machine and not for each reader.
        cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.environ.clear()
        os.environ.update(kept, HOME=str(home), PATH=path, XDG_CACHE_HOME=cache)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(ROOT)


if __name__ == "__main__":
    leave_network()
    try:
        for snippet, shown in run_page(Path(sys.argv[1]).resolve()):
            print(f"\n--- line {snippet.line}\n{snippet.code}---\n{shown}")
    except SnippetError as error:
        sys.exit(str(error))
