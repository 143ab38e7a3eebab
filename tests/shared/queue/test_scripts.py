"""The scripts are put together of their parts, as docs/protocol.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from promptq.shared.queue import call
from promptq.shared.queue.call import SCRIPT_NAMES, script_text
from tests.support.paths import ROOT

LUA = ROOT / "shared" / "lua"
PARTS = {path.stem: path for path in (LUA / "lib").iterdir()}
FILES = sorted(path.relative_to(LUA).as_posix() for path in LUA.rglob("*.lua"))


def used_by(text: str) -> list[str]:
    first_line = text.split("\n")[0]
    if not first_line.startswith("-- uses: "):
        return []
    return first_line.removeprefix("-- uses: ").split(", ")


def put_together(text: str) -> str:
    """Builds a script like a client of another language, from the description alone."""
    made = ""
    there: list[str] = []

    def add_parts_of(text: str) -> None:
        nonlocal made
        for name in used_by(text):
            if name not in there:
                part = PARTS[name].read_text()
                add_parts_of(part)
                there.append(name)
                made += f"local {name} = {{}} do\n{part}end\n"

    add_parts_of(text)
    return made + text


@pytest.mark.parametrize("name", SCRIPT_NAMES)
def test_the_description_makes_what_the_package_sends(name: str) -> None:
    text = (LUA / "scripts" / f"{name}.lua").read_text()
    assert put_together(text) == script_text(name)


def test_every_script_is_sent() -> None:
    scripts = [Path(file).stem for file in FILES if not file.startswith("lib/")]
    assert sorted(scripts) == sorted(SCRIPT_NAMES)


@pytest.mark.parametrize("file", FILES)
def test_a_file_names_just_the_parts_that_it_uses(file: str) -> None:
    text = (LUA / file).read_text()
    code = re.sub(r"--[^\n]*|'(?:[^'\\\n]|\\.)*'", "", text)
    used = set(re.findall(r"(?<![\w.])(\w+)\.\w", code)) & set(PARTS)
    if file.startswith("lib/"):
        used.discard(Path(file).stem)
    assert set(used_by(text)) == used


def test_a_script_carries_no_part_that_it_does_not_need() -> None:
    carried = re.findall(r"^local (\w+) = {} do$", script_text("purge"), re.MULTILINE)
    assert carried == ["keys", "numbers", "server", "pictures", "requests"]


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
