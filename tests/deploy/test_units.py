"""The systemd units, read by systemd itself, and held against the commands that they start."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from promptq.shared.runtime.settings import Settings
from tests.paths import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
PROGRAM = "/opt/promptq/bin/promptq"


def setting(unit: Path, name: str) -> str:
    [value] = re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)
    return str(value)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_has_nothing_to_say_of_a_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # It looks whether there is such a program.
    text = unit.read_text().replace(PROGRAM, "/bin/true")
    copy = tmp_path / unit.name.replace("@", "@1")
    copy.write_text(text)
    read = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    assert (read.stderr, read.returncode) == ("", 0)


def test_each_process_has_a_unit() -> None:
    started = {setting(unit, "ExecStart").split()[1] for unit in UNITS}
    assert started == {"worker", "gateway", "jobs"}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_waits_for_longer_than_its_process_takes_to_drain(unit: Path) -> None:
    drain = Settings.model_fields["drain_seconds"].default
    assert float(setting(unit, "TimeoutStopSec")) > drain
    assert setting(unit, "KillMode") == "mixed"  # the main process alone hears SIGTERM


def test_a_worker_is_watched() -> None:
    [worker] = [unit for unit in UNITS if "worker" in unit.name]
    assert setting(worker, "Type") == "notify"
    # Less, and systemd would kill a worker that its own watchdog still lets compute.
    stuck = Settings.model_fields["stuck_seconds"].default
    assert float(setting(worker, "WatchdogSec")) > stuck
