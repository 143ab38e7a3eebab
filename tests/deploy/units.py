"""The systemd units and their settings."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.paths import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))


def settings(unit: Path, name: str) -> list[str]:
    """The values of all lines with this name."""
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)
