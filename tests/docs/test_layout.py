"""Imports between folders, and between files, run in no circle. A reader of a test sees an assert.

import-linter does not see the files that lie beside a package's folders as one folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PARTS = ("producer", "worker", "shared")
FILES = {path.relative_to(ROOT) for part in PARTS for path in (ROOT / part).rglob("*.py")}
Imports = Mapping[Path, set[Path]]


def file_of(module: str) -> Path | None:
    """The file of a module of ours, such as `promptq.shared.errors`."""
    path = Path(*module.split(".")[1:])
    return next((it for it in (path.with_suffix(".py"), path / "__init__.py") if it in FILES), None)


def imported(text: str) -> Iterator[Path]:
    """The files that a text imports, also in functions and for types alone."""
    for node in ast.walk(ast.parse(text)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [[alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [[f"{node.module}.{alias.name}", node.module] for alias in node.names]
        for names in modules:
            ours = [it for it in names if it.startswith("promptq.")]
            yield from [file for file in map(file_of, ours) if file is not None][:1]


def circle(graph: Imports) -> list[str]:
    """The members of a circle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(each) for each in error.args[1]]
    return []


@pytest.fixture(scope="module")
def imports() -> Imports:
    """The files that each file imports."""
    return {file: {*imported((ROOT / file).read_text())} - {file} for file in FILES}


def test_no_files_import_each_other_in_a_circle(imports: Imports) -> None:
    assert sum(map(len, imports.values())) > 1000
    assert circle(imports) == []


def test_no_folders_import_each_other_in_a_circle(imports: Imports) -> None:
    folders: dict[Path, set[Path]] = {}
    for file, used in imports.items():
        folders.setdefault(file.parent, set()).update({it.parent for it in used} - {file.parent})
    assert circle(folders) == []


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("from promptq.shared import errors", ["shared/errors.py"]),
        ("def f():\n    from promptq.shared.errors import PromptqError", ["shared/errors.py"]),
        ("import promptq.worker.command as command", ["worker/command.py"]),
        ("import json", []),
    ],
)
def test_imports_are_found(text: str, files: list[str]) -> None:
    assert [str(it) for it in imported(text)] == files


def test_a_circle_is_found() -> None:
    one, two, three = (Path(name) for name in ("one", "two", "three"))
    assert set(circle({one: {two}, two: {three}, three: {two}})) == {"two", "three"}
    assert circle({one: {two}, two: {three}}) == []


ASSERTING = {"pytest.raises", "pytest.warns", "pytest.fail", "expect"}
"""`expect` is Playwright's."""


def hides_its_assert(test: ast.AST) -> bool:
    """Whether a test has no assert, and calls no helper whose name says that it asserts."""
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            return False
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ASSERTING or name.rpartition(".")[2].startswith("assert_"):
                return False
    return True


def find_tests(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(text)):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.name.startswith("test_"):
            yield node


def test_each_test_shows_what_it_asserts() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = [(file, test) for file in files for test in find_tests(file.read_text())]
    assert len(tests) > 2000
    assert [f"{file}: {test.name}" for file, test in tests if hides_its_assert(test)] == []


@pytest.mark.parametrize(
    ("body", "hides"),
    [
        ("assert 1", False),
        ("with pytest.raises(KeyError):\n        f()", False),
        ("page.assert_looks_right()", False),
        ("check(1)", True),
    ],
)
def test_a_hidden_assert_is_found(body: str, hides: bool) -> None:
    [test] = find_tests(f"class A:\n  async def test_it():\n    {body}")
    assert hides_its_assert(test) == hides
