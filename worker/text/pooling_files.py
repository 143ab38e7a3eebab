"""How a model's vectors are pooled, as files of sentence-transformers beside its weights say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import Pooling

_FILE = Path("1_Pooling", "config.json")
_PREFIX = "pooling_mode_"
_NAMES: dict[str, Pooling] = {
    "lasttoken": "last",
    "mean_tokens": "mean",
    "mean": "mean",
}


def pooling_of(folder: Path) -> Pooling | None:
    """`last` if there is no such file; None if it asks for another one, such as the first token.

    Raises ConfigurationError for a file that cannot be read.
    """
    file = folder / _FILE
    if not file.exists():
        return "last"
    try:
        modes = _modes(json.loads(file.read_bytes()))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"{file} does not say how vectors are pooled ({error}); name it with --pooling"
        ) from error
    return _NAMES.get(modes[0]) if len(modes) == 1 else None


def _modes(config: dict[str, Any]) -> list[str]:
    """The poolings that are on. Newer files have one name in place of a switch for each."""
    if isinstance(name := config.get("pooling_mode"), str):
        return [name]
    return [
        name.removeprefix(_PREFIX)
        for name, is_on in config.items()
        if name.startswith(_PREFIX) and is_on is True
    ]
