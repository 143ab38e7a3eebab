"""Assigns a queue to each of several models that one command starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from promptq.shared.errors import ConfigurationError


def queues_of_models(
    models: Sequence[str], queues: Sequence[str], first_queue: str
) -> dict[str, str | None]:
    """Returns the model of each queue (None without models). If `queues` is empty, the first
    model's queue is `first_queue`, and each other queue is named after its model.

    Raises ConfigurationError if there are too few or too many queues, or if two queues or two
    models have the same name.
    """
    if len(models) < 2 and len(queues) < 2:
        return {queues[0] if queues else first_queue: models[0] if models else None}
    names = [*queues] or [first_queue, *map(_queue_named_after, models[1:])]
    if len(names) != len(models):
        raise ConfigurationError(
            f"--queue: give one for each --model (queues: {len(names)}, models: {len(models)})"
        )
    if len({*names}) < len(names):
        raise ConfigurationError(
            f"--queue: two models would have one queue ({', '.join(names)}); give a --queue for"
            " each --model"
        )
    paths = {Path(model).name: model for model in models}
    for model in models:
        if paths[Path(model).name] != model and Path(model).exists():
            raise ConfigurationError(
                f"--model: {model} and {paths[Path(model).name]} would have one name, by which"
                " clients find them; rename one"
            )
    return dict(zip(names, models, strict=True))


def _queue_named_after(model: str) -> str:
    """Returns a queue's name for a model: `Qwen/Qwen3-0.6B` -> `Qwen3-0.6B`, `a/B.gguf` -> `B`."""
    path = Path(model)
    name = path.stem if path.suffix.lower() == ".gguf" and not path.is_dir() else path.name
    return re.sub(r"[^A-Za-z0-9_.\-]", "-", name)[:64] or "model"
