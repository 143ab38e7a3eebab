"""Reads end tokens and pooling from a model's configuration files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.shared.protocol.request import Pooling

_FILE = Path("1_Pooling", "config.json")
_PREFIX = "pooling_mode_"
_NAMES: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}


def pooling_of(folder: Path) -> Pooling | None:
    """Returns the pooling that a model's folder sets: `last` if the folder has no file about
    pooling, None if the pooling is not supported. Raises ConfigurationError if the file cannot be
    read."""
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
    """Returns the poolings that are on. Newer files name a pooling; older files have switches."""
    if isinstance(name := config.get("pooling_mode"), str):
        return [name]
    return [
        name.removeprefix(_PREFIX)
        for name, is_on in config.items()
        if name.startswith(_PREFIX) and is_on is True
    ]


def end_token_ids(configurations: Iterable[object]) -> frozenset[int]:
    """Returns the end tokens of the first configuration that has end tokens. Raises
    UnsupportedModelError if an end token is not a token id."""
    for configuration in configurations:
        ids = getattr(configuration, "eos_token_id", None)
        if ids is not None:
            ids = ids if isinstance(ids, (list, tuple)) else [ids]
            for token_id in ids:
                if type(token_id) is not int:
                    raise UnsupportedModelError(
                        f"the model's files: eos_token_id: {token_id!r:.80} is no token id"
                    )
            return frozenset(ids)
    return frozenset()
