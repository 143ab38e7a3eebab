"""`promptq settings`: all settings and their current values, by process."""

from __future__ import annotations

import json
from inspect import get_annotations
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from promptq.producer.commands.options import AsJson
from promptq.shared.server.connection import without_password
from promptq.shared.settings.common import (
    ENV_PREFIX,
    ReaperSettings,
    Settings,
    flag_of,
    read_settings,
    read_settings_of,
)
from promptq.shared.settings.worker import WorkerSettings, read_worker_settings


def settings(as_json: AsJson = False) -> None:
    """List the settings by process, with values and meanings. Each is an environment variable.

    A process reads the common settings and those of its kind, and ignores all
    others. Common settings and settings of workers are also options of
    `promptq worker`. If a value is not the default, the default is shown too.

    Examples:

    promptq settings
    PROMPTQ_MAX_NUM_SEQS=8 promptq settings --json
    """
    from promptq.producer.settings.files import FilesSettings
    from promptq.producer.settings.gateway import GatewaySettings
    from promptq.producer.settings.jobs import JobsSettings

    rows = [
        *_rows(read_settings(), None),
        *_rows(read_settings_of(ReaperSettings, flag_of), "worker, jobs"),
        *_rows(read_worker_settings(), "worker"),
        *_rows(read_settings_of(FilesSettings), "gateway, jobs"),
        *_rows(read_settings_of(GatewaySettings), "gateway"),
        *_rows(read_settings_of(JobsSettings), "jobs"),
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from promptq.producer.commands.screens.render import settings_list
    from promptq.producer.commands.screens.terminal import SafeConsole

    SafeConsole().print(settings_list(rows))


def _rows(current: Settings, process: str | None) -> list[dict[str, Any]]:
    """Returns a row for each setting of `current`, except inherited ones.

    `process` is the kind of process that reads these settings; None: all kinds.
    """
    kind = type(current)
    return [
        {
            "variable": ENV_PREFIX + name.upper(),
            "option": flag_of(name) if name in WorkerSettings.model_fields else None,
            "process": process,
            "default": _shown(kind.model_fields[name].get_default(call_default_factory=True)),
            "value": _shown(getattr(current, name)),
            "description": kind.model_fields[name].description,
        }
        for name in get_annotations(kind)
    ]


def _shown(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return "***"
    if isinstance(value, str) and "://" in value:
        return without_password(value)
    return str(value) if isinstance(value, Path) else value
