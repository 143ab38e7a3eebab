"""Keeps the results of all programs by engine, and writes docs/compatibility.md from them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.programs.compat.catalogue import PROGRAMS, Program
from tests.programs.compat.recorder import Exchange
from tests.support.paths import ROOT

RESULTS = Path(__file__).with_name("results")
"""The folder of the results, one file for each engine."""
NATIVE = "native"
ENGINES = (NATIVE, "vllm", "llama.cpp")
PAGE = ROOT / "docs" / "compatibility.md"
_REASON = 400
_HEAD = f"""# Other people's programs

`python -m tests compat` tests these programs with a real gateway and the [shipped
model](architecture.md), and writes this page. Each program has a separate environment, an API key,
and the alias `gpt-4o` for the model.

Each attempt tests one feature: a call, a stream, a tool, a schema, or the error of a wrong call,
which must say how to correct the call. *passes* counts the right results of promptq's own engine,
*fails* its wrong results. *vLLM* and *llama.cpp* count right results through these servers, which
[refuse some fields](engines.md#refused-fields). *APIs* are the parts of the API that the program
used. `{RESULTS.relative_to(ROOT)}` has all attempts.

| program | version | passes | vLLM | llama.cpp | APIs | fails |
|---|---|---|---|---|---|---|
"""
_CHANGING = (
    (re.compile(r"(?:https?://)?(?:127\.0\.0\.1|localhost):\d+"), "GATEWAY"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "0x"),
    (re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"), "ID"),
    (re.compile(r"\b(chatcmpl|cmpl|resp|msg|call|req)[-_][\w-]{8,}"), r"\1-ID"),
    (re.compile(r"/[\w./-]*/compat(?:-\w+)?/"), ""),
)
"""Texts that differ between runs."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a program, as its script reports it."""

    tried: str
    passed: bool
    got: str
    why: str


@dataclass(frozen=True)
class Result:
    """The attempts of one program."""

    version: str
    passes: Sequence[str]
    fails: Mapping[str, str]
    """Names of attempts, each with its reason."""
    sends: Mapping[str, Sequence[str]]
    """By method and path, the fields that the program sent."""


def result_of(
    program: Program, attempts: Sequence[Attempt], exchanges: Sequence[Exchange]
) -> Result:
    fails = {each.tried: _reason(each.why) for each in attempts if not each.passed}
    passes = [each.tried for each in attempts if each.tried not in fails]
    version = program.version or "whatever the machine has"
    return Result(version, [*dict.fromkeys(passes)], fails, _sent(exchanges))


def write(results: Mapping[str, Result], engine: str = NATIVE) -> None:
    """Write the results of programs with one engine into the engine's file, and write the page.
    Results of other programs stay."""
    kept = {**read_all()[engine], **results}
    rows = {name: asdict(kept[name]) for name in PROGRAMS if name in kept}
    RESULTS.mkdir(exist_ok=True)
    _file(engine).write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(text_of(read_all()))


def read_all() -> dict[str, dict[str, Result]]:
    """Returns the results by engine and program."""
    files = {engine: _file(engine) for engine in ENGINES}
    return {
        engine: _read(file.read_text()) if file.exists() else {} for engine, file in files.items()
    }


def text_of(results: Mapping[str, Mapping[str, Result]]) -> str:
    """Returns the text of the page from the results by engine and program."""
    rows = []
    for name, result in results[NATIVE].items():
        others = (results[engine].get(name) for engine in ENGINES[1:])
        about, fails = PROGRAMS[name].about, result.fails
        reasons = dict.fromkeys(_in_words(PROGRAMS[name], *attempt) for attempt in fails.items())
        cells = (
            f"{name} ({about})" if about else name,
            result.version,
            str(len(result.passes)),
            *("" if other is None else str(len(other.passes)) for other in others),
            ", ".join(_apis(result.sends)),
            _cell(f"{len(fails)}: {'; '.join(reasons)}" if fails else ""),
        )
        rows.append(re.sub(r"\|  (?=\|)", "| ", " | ".join(("", *cells, "")).strip()))
    return _HEAD + "\n".join(rows) + "\n"


def committed(engine: str = NATIVE) -> dict[str, set[str]]:
    """Returns, for each program, the attempts that pass in the committed results with this engine;
    empty if there are no results."""
    command = ["git", "-C", str(ROOT), "show", f"HEAD:{_file(engine).relative_to(ROOT)}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = _read(done.stdout or "{}")
    return {name: set(result.passes) for name, result in results.items()}


def _file(engine: str) -> Path:
    return RESULTS / f"{engine}.json"


def _read(text: str) -> dict[str, Result]:
    return {name: Result(**fields) for name, fields in json.loads(text).items()}


def _apis(paths: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of the APIs that a program called, by the first part of their paths."""
    called = {match[1] for path in paths if (match := re.match(r"POST /v1/([a-z]+)", path))}
    return sorted(called - {"files"})


def _in_words(program: Program, tried: str, why: str) -> str:
    known = (reason for end, reason in program.reasons.items() if tried.endswith(end))
    return next(known, f"{tried}: {why}")


def _reason(text: str) -> str:
    for pattern, instead in _CHANGING:
        text = pattern.sub(instead, text)
    text = " ".join(text.split())
    return text if len(text) <= _REASON else f"{text[:_REASON]} ..."


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("](", "] (").replace("`", "'")


def _sent(exchanges: Sequence[Exchange]) -> dict[str, list[str]]:
    """By method and path, all fields that a program sent there."""
    found: dict[str, set[str]] = {}
    for each in exchanges:
        fields = found.setdefault(f"{each.method} {each.path.split('?')[0]}", set())
        try:
            body = json.loads(each.body)
        except ValueError:
            continue
        if isinstance(body, dict):
            fields.update(body)
    ids = re.compile(r"/(?:[\w-]*[0-9a-f-]{20,}|file-\w+|batch_\w+)")
    named: dict[str, set[str]] = {}
    for path, fields in found.items():
        named.setdefault(ids.sub("/ID", path), set()).update(fields)
    return {path: sorted(fields) for path, fields in sorted(named.items())}
