"""Structured logs: colour for people at a terminal, JSON lines for programs."""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

import structlog

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure_logs(level: str, form: str) -> None:
    """Send log lines of at least `level` to standard error, in the form auto, console or json."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if not console else "%H:%M:%S", utc=not console),
    ]
    if console:
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.getLogger("transformers").setLevel(logging.ERROR)


def get_logger(**bound: Any) -> structlog.typing.FilteringBoundLogger:
    """A logger with `bound` in every line."""
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger(**bound))
