"""`promptq settings`: what can be set, and what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from producer.commands.options import AsJson
from shared.connection import without_password
from shared.settings import ENV_PREFIX, Settings, flag_of


def settings(as_json: AsJson = False) -> None:
    """List the settings, each an environment variable.

    Those of workers are options of `promptq worker` too; those that begin with
    PROMPTQ_HTTP_ are the gateway's.

    Examples:

      promptq settings
      PROMPTQ_MAX_NUM_SEQS=8 promptq settings --json
    """
    from producer.gateway.settings import read_gateway_settings

    rows = _settings_rows(read_gateway_settings())
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console

    from producer.commands.render import settings_table

    Console().print(settings_table(rows))


def _settings_rows(current: Settings) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, field in type(current).model_fields.items():
        value = getattr(current, name)
        if name == "redis_url" and value is not None:
            value = without_password(value)
        rows.append(
            {
                "variable": ENV_PREFIX + name.upper(),
                "option": flag_of(name) if name in Settings.model_fields else None,
                "default": _shown(field.get_default(call_default_factory=True)),
                "value": _shown(value),
                "description": field.description,
            }
        )
    return rows


def _shown(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
