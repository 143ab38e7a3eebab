"""Which builds and tests `python -m tests sanitizers` has."""

from __future__ import annotations

import pytest

from promptq.worker.engine.native.build import KINDS
from tests.support.paths import ROOT
from tests.worker.engine.native.sanitizers import KERNELS, OTHER_PARTS, flags_of_builds


@pytest.mark.parametrize(
    ("kind", "emulated"),
    [
        ("avx2", ["AVX-512", "VNNI", "tile registers"]),
        ("avx512", ["VNNI", "tile registers"]),
        ("avx512-vnni", ["tile registers"]),
        ("amx", []),
    ],
)
def test_only_missing_instructions_are_emulated(kind: str, emulated: list[str]) -> None:
    builds = flags_of_builds(KINDS[kind].features)
    assert [name for name in builds if "emulated" in name] == [
        f"with emulated {name}" for name in emulated
    ]
    assert ("for AVX2" in builds) == (kind != "avx2")


def test_chosen_tests_exist() -> None:
    """A run of pytest would find a wrong name only after minutes of compiling."""
    for test in (*KERNELS, *OTHER_PARTS):
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
