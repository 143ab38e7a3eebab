"""`promptq settings`: all settings and their current values."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from promptq.producer.commands.options import AsJson
from promptq.shared.server.connection import without_password
from promptq.shared.settings.common import ENV_PREFIX, Settings, flag_of, read_settings


def settings(as_json: AsJson = False) -> None:
    """List the settings and their current values. Each is an environment variable.

    The first ones are also options of `promptq worker`. The others, below them,
    are only for other processes.

    Examples:

    promptq settings
    PROMPTQ_MAX_NUM_SEQS=8 promptq settings --json
    """
    from promptq.producer.settings.files import read_files_settings
    from promptq.producer.settings.gateway import read_gateway_settings
    from promptq.producer.settings.jobs import read_jobs_settings

    rows: list[dict[str, Any]] = []
    known: set[str] = set()
    for process, current in (
        (None, read_settings()),
        ("gateway, jobs", read_files_settings()),
        ("gateway", read_gateway_settings()),
        ("jobs", read_jobs_settings()),
    ):
        rows += _settings_rows(current, process, known)
        known |= type(current).model_fields.keys()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from promptq.producer.commands.screens.render import settings_list
    from promptq.producer.commands.screens.terminal import SafeConsole

    SafeConsole().print(settings_list(rows))


def _settings_rows(current: Settings, process: str | None, known: Set[str]) -> list[dict[str, Any]]:
    """Rows for settings that are not `known` yet; `process` is where they apply, None: anywhere."""
    rows: list[dict[str, Any]] = []
    for name, field in type(current).model_fields.items():
        if name in known:
            continue
        value = getattr(current, name)
        if name == "upstream_key" and value is not None:
            value = SecretStr(value)
        elif name.endswith(("redis_url", "upstream", "otlp_endpoint")) and value is not None:
            value = without_password(value)
        rows.append(
            {
                "variable": ENV_PREFIX + name.upper(),
                "option": flag_of(name) if name in Settings.model_fields else None,
                "process": process,
                "default": _shown(field.get_default(call_default_factory=True)),
                "value": _shown(value),
                "description": field.description,
            }
        )
    return rows


def _shown(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return "***"
    return str(value) if isinstance(value, Path) else value
