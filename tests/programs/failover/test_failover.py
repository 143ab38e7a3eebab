"""A primary that loses power keeps what its `appendfsync` promises. Servers and clients are
processes, because the fault hits a machine."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def row_of(*words: str) -> dict[str, Any]:
    """Run the row of the table that has these words. Returns the counts."""
    command = [sys.executable, "-m", "tests", "failover", "--only", *words]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if "namespaces" in finished.stderr:
        pytest.skip(finished.stderr.strip())
    assert finished.returncode == 0, finished.stdout + finished.stderr
    row: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return row


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(("sync", "loses"), [("always", False), ("no", True)])
def test_a_machine_without_power_loses_only_what_is_not_synced(sync: str, loses: bool) -> None:
    row = row_of("alone", "valkey", "power", sync)
    assert row["acknowledged"] > 50
    assert (row["lost"] + row["forgotten"] > 0) == loses
    assert row["violations"] == []
    # No reader takes a part for the whole; a request that is lost is named as unknown.
    assert set(row["readers"]) <= {"RequestNotFoundError", "StreamChangedError"}
    assert sum(row["readers"].values()) >= row["lost"]
