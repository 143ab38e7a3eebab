"""Files of the checkout that tests read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


BOARD = ROOT / "deploy" / "grafana" / "promptq.json"


def panels() -> list[dict[str, Any]]:
    return [it for it in json.loads(BOARD.read_text())["panels"] if it["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]
