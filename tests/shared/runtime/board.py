"""What the Grafana board asks of Prometheus."""

from __future__ import annotations

import json
from typing import Any

from tests.support.paths import ROOT

BOARD = ROOT / "deploy" / "grafana" / "promptq.json"


def panels() -> list[dict[str, Any]]:
    return [it for it in json.loads(BOARD.read_text())["panels"] if it["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]
