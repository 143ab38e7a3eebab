"""docs/compatibility.md shows the results, and a run replaces only the results of its programs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.changes import git
from tests.programs.compat import page
from tests.programs.compat.catalogue import PROGRAMS
from tests.programs.compat.page import Attempt
from tests.programs.compat.recorder import Exchange

COMMITTED = page.read_all()


def test_the_page_is_that_of_the_results() -> None:
    for engine in page.ENGINES:
        assert list(COMMITTED[engine]) == list(PROGRAMS), engine
        assert all(result.passes for result in COMMITTED[engine].values()), engine
    assert page.text_of(COMMITTED) == page.PAGE.read_text()


@pytest.mark.parametrize("engine", page.ENGINES)
def test_a_run_of_one_program(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, written = tmp_path / "results", tmp_path / "page.md"
    shutil.copytree(page.RESULTS, results)
    monkeypatch.setattr(page, "RESULTS", results)
    monkeypatch.setattr(page, "PAGE", written)
    attempts = [
        Attempt("openai-chat: Basic", True, "text", ""),
        Attempt("openai-chat: Image Input", False, "", "HTTP 400"),
        Attempt("anthropic: Image Input", False, "", "HTTP 400"),
        Attempt("a|b", False, "", "no answer from http://127.0.0.1:4711/v1\n  in `time`"),
        Attempt("a|b", True, "text", ""),  # a name that fails once does not pass
    ]
    exchanges = [
        Exchange(0.0, "POST", "/v1/chat/completions?x=1", body='{"model": "m", "n": 1}'),
        Exchange(0.0, "POST", "/v1/chat/completions", body='{"user": "u"}'),
        Exchange(0.0, "GET", "/v1/batches/batch_1"),
        Exchange(0.0, "POST", "/v1/files", body="no JSON"),
    ]
    program = PROGRAMS["llm-comply"]
    page.write({program.name: page.result_of(program, attempts, exchanges)}, engine)
    read = page.read_all()
    assert read[engine].pop(program.name) == page.Result(
        program.version,
        ["openai-chat: Basic"],
        {
            "openai-chat: Image Input": "HTTP 400",
            "anthropic: Image Input": "HTTP 400",
            "a|b": "no answer from GATEWAY/v1 in `time`",
        },
        {
            "GET /v1/batches/ID": [],
            "POST /v1/chat/completions": ["model", "n", "user"],
            "POST /v1/files": [],
        },
    )
    kept = {name: result for name, result in COMMITTED[engine].items() if name != program.name}
    assert read == {**COMMITTED, engine: kept}
    row = next(line for line in written.read_text().splitlines() if "llm-comply" in line)
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    assert cells[:2] == ["llm-comply (conformance tests)", program.version]
    assert cells[2 + page.ENGINES.index(engine)] == "1"
    if engine == page.NATIVE:
        fails = r"3: images are not served; a\|b: no answer from GATEWAY/v1 in 'time'"
        assert cells[5:] == ["chat", fails]


def test_what_passed_before_is_read_from_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    git(tmp_path, "init", "--quiet")
    assert page.committed() == {}
    page.RESULTS.mkdir()
    file = page.RESULTS / "native.json"
    file.write_text('{"curl": {"version": "8", "passes": ["a"], "fails": {}, "sends": {}}}')
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "a")
    file.write_text("{}")
    assert page.committed() == {"curl": {"a"}}
