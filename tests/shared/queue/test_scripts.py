"""The scripts are put together of their parts, as docs/protocol.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

from promptq.shared.protocol.claims import Room
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import call, request_queue, scripts
from promptq.shared.queue.call import SCRIPT_NAMES, script_text, text_of
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.paths import ROOT
from tests.support.requests import put, row

LUA = ROOT / "shared" / "lua"
PARTS = {path.stem: path for path in (LUA / "lib").iterdir()}
FILES = sorted(path.relative_to(LUA).as_posix() for path in LUA.rglob("*.lua"))


def used_by(text: str) -> list[str]:
    first_line = text.split("\n")[0]
    if not first_line.startswith("-- uses: "):
        return []
    return first_line.removeprefix("-- uses: ").split(", ")


def put_together(text: str, *, at_once: bool = False) -> str:
    """Builds a script like a client of another language, from the description alone. With
    `at_once`, all parts run at once, as release 0.3.0 and earlier described."""
    made = ""
    there: list[str] = []

    def add_parts_of(text: str) -> None:
        nonlocal made
        for name in used_by(text):
            if name not in there:
                part = PARTS[name].read_text()
                add_parts_of(part)
                there.append(name)
                if at_once or name in ("keys", "numbers", "server"):
                    made += f"local {name} = {{}} do\n{part}end\n"
                else:
                    made += f"local {name} = setmetatable({{}}, {{__index = function({name}, ...)"
                    made += f" setmetatable({name}, nil)\n{part}return {name}[...] end}})\n"

    add_parts_of(text)
    return made + text


@pytest.mark.parametrize("name", SCRIPT_NAMES)
def test_the_description_makes_what_the_package_sends(name: str) -> None:
    text = (LUA / "scripts" / f"{name}.lua").read_text()
    assert put_together(text) == script_text(name)


def test_every_script_is_sent() -> None:
    sent = [Path(file).stem for file in FILES if not file.startswith("lib/")]
    assert sorted(sent) == sorted(SCRIPT_NAMES)


@pytest.mark.parametrize("file", FILES)
def test_a_file_names_just_the_parts_that_it_uses(file: str) -> None:
    text = (LUA / file).read_text()
    code = re.sub(r"--[^\n]*|'(?:[^'\\\n]|\\.)*'", "", text)
    used = set(re.findall(r"(?<![\w.])(\w+)\.\w", code)) & set(PARTS)
    if file.startswith("lib/"):
        used.discard(Path(file).stem)
    assert set(used_by(text)) == used


def test_a_script_carries_no_part_that_it_does_not_need() -> None:
    carried = re.findall(r"^local (\w+) = (?:{} do|setmeta.*)$", script_text("purge"), re.MULTILINE)
    assert carried == ["keys", "numbers", "server", "pictures", "requests"]


def test_a_client_may_run_all_parts_at_once(
    everything: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        name: put_together((LUA / "scripts" / f"{name}.lua").read_text(), at_once=True)
        for name in SCRIPT_NAMES
    }
    monkeypatch.setattr(request_queue, "script_text", texts.__getitem__)
    queue = RequestQueue(everything)
    put(queue, "r")
    [claim] = queue.take_batch(Room(1, 10**9))
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    assert queue.state("r") is RequestState.COMPLETED


def test_a_call_runs_only_the_parts_that_it_needs(
    everything: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part notes that it ran."""

    def noting(name: str) -> str:
        return re.sub(
            r"(__index = function\((\w+), ...\))",
            r"\1 redis.call('SADD', 'ran', '\2')",
            script_text(name),
        )

    monkeypatch.setattr(request_queue, "script_text", noting)
    queue = RequestQueue(everything)

    def ran() -> set[str]:
        names = {text_of(name) for name in everything.smembers("ran")}
        everything.delete("ran")
        return names

    put(queue, "r")
    assert ran() == {"arguments", "requests", "pending", "backlog_limits", "scores"}
    [claim] = queue.take_batch(Room(1, 10**9))
    in_each_claim = {"arguments", "requests", "pending", "ending", "fair_share", "running_limits"}
    assert ran() == in_each_claim
    assert not queue.take_batch(Room(1, 10**9))
    assert ran() == in_each_claim - {"running_limits"}
    queue.publish([row(claim, 0)])
    assert ran() == {"requests"}
    queue.publish([row(claim, 1, reason=FinishReason.STOP)])
    assert ran() == {"requests", "ending"}
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w"), 60_000))
    assert ran() == set()


def test_parts_that_use_each_other_in_a_circle_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("lib", "scripts"):
        (tmp_path / folder).mkdir()
    for name, used in (("one", "two"), ("two", "three"), ("three", "two")):
        (tmp_path / "lib" / f"{name}.lua").write_text(f"-- uses: {used}\n")
    (tmp_path / "scripts" / "script.lua").write_text("-- uses: one\nreturn 1\n")
    monkeypatch.setattr(call, "_LUA", tmp_path)
    with pytest.raises(ValueError, match="in a circle: one -> two -> three -> two"):
        script_text("script")
