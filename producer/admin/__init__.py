"""Functions that read and control a whole queue. Each module is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from promptq.producer.admin import api_keys as api_keys
    from promptq.producer.admin import autoscaling as autoscaling
    from promptq.producer.admin import dead_letters as dead_letters
    from promptq.producer.admin import overview as overview
    from promptq.producer.admin import queue_control as queue_control
    from promptq.producer.admin import queue_stats as queue_stats
    from promptq.producer.admin import queue_views as queue_views
    from promptq.producer.admin import timeline as timeline


def __getattr__(name: str) -> ModuleType:
    full_name = f"{__name__}.{name}"
    try:
        return import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name != full_name:  # a package that the module needs is missing
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error
