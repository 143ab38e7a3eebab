"""docs/compatibility.md shows results.json, and a run replaces only the results of its programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.changes import git
from tests.programs.compat import page
from tests.programs.compat.catalogue import PROGRAMS
from tests.programs.compat.page import Attempt
from tests.programs.compat.recorder import Exchange

COMMITTED = page.read(page.RESULTS.read_text())


def test_the_page_is_that_of_the_results() -> None:
    assert list(COMMITTED) == list(PROGRAMS)
    assert page.text_of(COMMITTED) == page.PAGE.read_text()
    assert all(result.passes for result in COMMITTED.values())


def test_a_run_of_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, written = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(page.RESULTS.read_text())
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
    page.write({program.name: page.result_of(program, attempts, exchanges)})
    read = page.read(results.read_text())
    assert read.pop(program.name) == page.Result(
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
    assert read == {name: result for name, result in COMMITTED.items() if name != program.name}
    assert (
        f"| llm-comply (conformance tests) | {program.version} | 1 | chat |"
        r" 3: images are not served; a\|b: no answer from GATEWAY/v1 in 'time' |" + "\n"
    ) in written.read_text()


def test_what_passed_before_is_read_from_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    git(tmp_path, "init", "--quiet")
    assert page.committed() == {}
    page.RESULTS.write_text('{"curl": {"version": "8", "passes": ["a"], "fails": {}, "sends": {}}}')
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "a")
    page.RESULTS.write_text("{}")
    assert page.committed() == {"curl": {"a"}}
