"""Structured logs: colour for people at a terminal, JSON lines for programs."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Mapping, MutableMapping
from textwrap import indent
from typing import Any, TextIO, cast

import structlog

from promptq.shared.runtime.printable import printable

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_ACCESS_LOG = "uvicorn.access"


def configure_logs(level: str, form: str) -> None:
    """Sends log lines of at least `level` to standard error.

    `form` is `console`, `json`, or `auto`, which means console at a terminal, otherwise json. Lines
    of the standard `logging` module get this form too. The engine and uvicorn log lines of at least
    `level`, other libraries log only warnings and errors. Run uvicorn with `log_config=None`.
    """
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console)
    common: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        stamp,
    ]
    rendering: list[Any] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(_json),
    ]
    if console:
        colors = sys.stderr.isatty()
        rendering = [
            _printable_values,
            structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_write_traceback),
        ]
    structlog.configure(
        processors=[*common, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        # Each line is one write, because other processes write to the stream too.
        logger_factory=lambda *_: structlog.WriteLogger(_STANDARD_ERROR),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(_STANDARD_ERROR)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, _name_fields],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
            pass_foreign_args=True,
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(_LEVELS[level], logging.WARNING))
    for name in ("uvicorn", "promptq.worker.engine"):
        logging.getLogger(name).setLevel(_LEVELS[level])


def take_over_logs(*libraries: str) -> None:
    """Makes these libraries, already imported, log only through the root logger's handler.

    Warnings of transformers are dropped: most of them advise kernels that promptq does not use.
    """
    for name in libraries:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.ERROR if name == "transformers" else logging.NOTSET)


class _CurrentStandardError:
    """Standard error, looked up for each line, because a program may replace `sys.stderr`."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


_STANDARD_ERROR = cast("TextIO", _CurrentStandardError())
"""The stream of all loggers. The loggers share one object, which has the lock of the stream."""


def get_logger(**bound: Any) -> structlog.typing.FilteringBoundLogger:
    """Returns a logger that adds the fields `bound` to every line."""
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger(**bound))


bind = structlog.contextvars.bind_contextvars
"""Adds fields to every line that this task logs from now on, by any logger.

The code that serves an HTTP request binds its `request_id`, so that uvicorn's line has it too.
"""

unbind = structlog.contextvars.unbind_contextvars
"""Removes fields that `bind` added. Call `unbind` when a task begins other work: a new task
inherits the fields of the task that created it."""


def _printable_values(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escapes unsafe characters in a line's values, because clients choose these values."""
    for name, value in line.items():
        if name != "exc_info" and not name.startswith("_"):
            line[name] = printable(value if isinstance(value, str) else repr(value))
    return line


def _write_traceback(target: TextIO, exc_info: Any) -> None:
    """Writes a traceback indented, so that no line of an exception looks like a line of the log."""
    plain = io.StringIO()
    structlog.dev.plain_traceback(plain, exc_info)
    target.write(indent(printable(plain.getvalue(), keep="\n"), "  "))


def _json(line: Any, **options: Any) -> str:
    """Returns the line as ASCII JSON. DEL, the only unsafe character left, is escaped too."""
    return json.dumps(line, **options).replace("\x7f", "\\u007f")


def _name_fields(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Adds the logger's name and fields to a line of the standard library's `logging`. The fields
    come from a mapping that was logged with the text, or from uvicorn's access line."""
    values = line.pop("positional_args", ())
    line["logger"] = line["_record"].name
    if isinstance(values, Mapping):
        line.update(values)
    elif line["logger"] == _ACCESS_LOG and len(values) == 5:
        client, method, path, _version, status = values
        line["event"] = "answered"
        # A query may hold a secret.
        path = path.split("?")[0]
        line.update(client=client, method=method, path=path, status=status)
    return line
